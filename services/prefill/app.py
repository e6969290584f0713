"""A prefill node: the prefill machine, an engine, and streams to decode and cache nodes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from services.prefill.config import Config
from shared.core.worker.events import JobSubmitted
from shared.core.worker.prefill import PrefillMachine
from shared.core.worker.transfers import CommitHandoff, OpenHandoff
from shared.io.service import Context
from shared.protocol import subjects
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import Role
from shared.protocol.model import ModelSpec
from shared.protocol.requests import PrefillJob
from shared.worker_node.node import Node


class PrefillNode(Node):
    """Implements App."""

    role: Role = "prefill"

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self.config = config

    def make_machine(self, spec: ModelSpec, pages: int, cost: CostCoefficients) -> PrefillMachine:
        return PrefillMachine(
            self.config.machine(spec, pages, self.context.incarnation, cost, self.context.host)
        )

    async def subscribe(self) -> None:
        await self.context.bus.subscribe(subjects.prefill(self.context.node), PrefillJob, self._on_job)

    async def _on_job(self, job: PrefillJob) -> Any:
        return self.ask(JobSubmitted(job, self.next_ask()))

    def execute(self, command: Any) -> Awaitable[Any] | None:
        match command:
            case OpenHandoff():
                self.streams.open_handoff(command)
                return None
            case CommitHandoff():
                return self.streams.commit_handoff(command)
            case _:
                raise NotImplementedError(f"a prefill machine does not order {type(command).__name__}")

    def on_tick(self) -> None:
        """A prefill node has no periodic work of its own."""

    def own_counters(self) -> dict[str, float]:
        return {}
