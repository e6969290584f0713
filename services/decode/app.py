"""A decode node: the decode machine, an engine, and landings for the KV that prefill nodes send."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from services.decode.config import Config
from shared.core.worker.decode import DecodeMachine
from shared.core.worker.events import ReserveAsked
from shared.core.worker.transfers import CloseLanding, OpenLanding
from shared.io.service import Context
from shared.protocol import subjects
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import Role
from shared.protocol.model import ModelSpec
from shared.protocol.requests import ReserveRequest
from shared.worker_node.landing_events import Landings
from shared.worker_node.node import Node


class DecodeNode(Node):
    """Implements App."""

    role: Role = "decode"

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self.config = config

    def make_machine(self, spec: ModelSpec, pages: int, cost: CostCoefficients) -> DecodeMachine:
        self.landings = Landings(self.plane, self.feed)
        return DecodeMachine(
            self.config.machine(spec, pages, self.context.incarnation, cost, self.context.host)
        )

    async def subscribe(self) -> None:
        await self.context.bus.subscribe(
            subjects.reserve(self.context.node), ReserveRequest, self._on_reserve
        )

    async def _on_reserve(self, request: ReserveRequest) -> Any:
        return self.ask(ReserveAsked(request, self.next_ask()))

    def execute(self, command: Any) -> Awaitable[Any] | None:
        match command:
            case OpenLanding():
                self.landings.open(command)
                return None
            case CloseLanding():
                return self.landings.close(command)
            case _:
                raise NotImplementedError(f"a decode machine does not order {type(command).__name__}")

    def on_tick(self) -> None:
        self.landings.look()

    def own_counters(self) -> dict[str, float]:
        return {"landing_first_slice_at_s": self.landings.first_slice_at}
