"""The gateway behind its fronts: takes bodies, runs generations, and passes each token to its generation.

Fronts differ only in how a body arrives and how updates leave.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog

from services.gateway.api.errors import UnknownModel
from services.gateway.api.request import GenerateRequest, Kind
from services.gateway.api.validate import Checked, check_body, complete
from services.gateway.config import GatewayConfig
from services.gateway.generation.cluster import Cluster, LoadText, ServedModel
from services.gateway.generation.generation import Generation, Owner
from services.gateway.generation.metrics.request_metrics import Metrics, Tracked
from services.gateway.generation.node_client import NodeClient
from shared.core.machine import BusLost, Event
from shared.core.request import events as ev
from shared.io.bus import Bus
from shared.io.recorder import Recorder
from shared.protocol import subjects
from shared.protocol.errors import Cancelled, Invalid, Overloaded, TsukimiError, Unavailable
from shared.protocol.ids import AttemptId, RequestId, new_request_id, request_of
from shared.protocol.requests import CancelAttempt, TokenBatch

log = structlog.get_logger(__name__)

LONG_TEXT_CHARS = 8192
"""Prompts of more characters are encoded on another thread. Grammars are always compiled on one."""
STRAYS_KEPT = 1024

ReadBody = Callable[[], Awaitable[Mapping[str, Any]]]
"""Reads the body when its turn comes. Raises TsukimiError."""


class Gateway:
    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        incarnation: str,
        tasks: asyncio.TaskGroup,
        load_text: LoadText,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.cluster = Cluster(bus, config.node, config.lost_after_s, load_text, self._tell_all)
        self.metrics = Metrics(lambda: self.cluster.members)
        self.running: dict[RequestId, Generation] = {}
        self.draining = False
        self._bus = bus
        self._recorder = recorder
        self._owner = Owner(config.node, incarnation)
        self._tasks = tasks
        self._node_client = NodeClient(bus, config.call_s, incarnation)
        self._lifecycle = ev.LifecycleConfig(budget_s=config.budget_s, idle_sync_s=config.idle_sync_s)
        self._strays: OrderedDict[AttemptId, None] = OrderedDict()
        self._idle = asyncio.Event()

    async def start(self) -> None:
        await self._bus.subscribe_ordered(subjects.tokens(self.config.node), TokenBatch, self._on_tokens)
        await self.cluster.start(self._tasks)

    @property
    def choices_running(self) -> int:
        return sum(len(g.choices) for g in self.running.values())

    # -- from a body to its end --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self, front: str, kind: Kind, body: ReadBody, request_id: str = "", *, always_streams: bool = False
    ) -> AsyncIterator[tuple[Generation, Tracked]]:
        """Run a generation while the block runs. Raises TsukimiError if it cannot be generated. The exception that leaves
        the block decides how the request is counted."""
        with self.metrics.track(front, kind, request_id) as tracked:
            request, served = await self._check(kind, await body(), always_streams)
            generation = self._open(request, served)
            tracked.generation = generation
            try:
                generation.start()
                if not self._bus.connected:
                    generation.feed_all(BusLost())
                yield generation, tracked
            except Cancelled as e:
                generation.leave(e.message)
                raise
            finally:
                await generation.close()
                del self.running[request.id]
                if not self.running:
                    self._idle.set()

    def missing(self) -> list[str]:
        """Why a request could not be served now; empty when ready."""
        return ["shutting down"] if self.draining else self.cluster.missing()

    async def drain(self, grace_s: float) -> None:
        """Take nothing new. Return when the last generation has ended; at the deadline, fail those that remain."""
        self.draining = True
        if not await self.wait_idle(grace_s):
            self.end_all("the gateway is shutting down")

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether the last generation has ended by then."""
        if self.running:
            self._idle.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return True

    def end_all(self, why: str) -> None:
        for generation in list(self.running.values()):
            generation.leave(why, Unavailable(why))

    async def _check(
        self, kind: Kind, body: Mapping[str, Any], always_streams: bool
    ) -> tuple[GenerateRequest, ServedModel]:
        if self.draining:
            raise Unavailable("the gateway is shutting down", retry_after_s=1.0)
        checked = check_body(kind, body, always_streams=always_streams)
        served = self._served(checked)
        most = self.cluster.most_tokens(served.spec)
        arguments = (
            checked, served.spec, served.text, new_request_id(), secrets.randbits(64), int(time.time()), most
        )  # fmt: skip
        long = checked.chars > LONG_TEXT_CHARS or checked.asked is not None
        request = await asyncio.to_thread(complete, *arguments) if long else complete(*arguments)
        if always_streams:
            request = msgspec.structs.replace(request, stream=True, include_usage=True)
        return request, served

    def _served(self, checked: Checked) -> ServedModel:
        models = self.cluster.models
        if not models:
            raise Unavailable(
                "no model is ready yet: " + "; ".join(self.cluster.missing()), retry_after_s=2.0
            )
        if checked.model is None and len(models) == 1:
            return next(iter(models.values()))
        if checked.model is None:
            raise Invalid(f"model: must name one of {', '.join(sorted(models))}", param="model")
        served = models.get(checked.model)
        if served is None:
            raise UnknownModel(
                f"model: {checked.model!r} is not served; served: {', '.join(sorted(models))}", param="model"
            )
        return served

    def _open(self, request: GenerateRequest, served: ServedModel) -> Generation:
        if self.draining:
            raise Unavailable("the gateway is shutting down", retry_after_s=1.0)
        if self.choices_running + request.choices > self.config.max_running:
            raise Overloaded(
                f"{self.choices_running} of {self.config.max_running} choices are running", retry_after_s=1.0
            )
        generation = Generation(
            request,
            served.text,
            self._owner,
            self._lifecycle,
            self._node_client,
            self._cancel,
            self.config.buffer_bytes,
            self._recorder,
        )
        self.running[request.id] = generation
        return generation

    # -- tokens and other news ---------------------------------------------------------------------------------------

    def _on_tokens(self, batch: TokenBatch) -> None:
        for delta in batch.deltas:
            generation = self.running.get(request_of(delta.attempt))
            choice = choice_of(delta.attempt)
            if generation is not None and choice < len(generation.choices):
                event = ev.TokensArrived(delta.attempt, batch.node, batch.incarnation, delta)
                generation.choices[choice].feed(event)
            elif delta.finish is None:
                self._stray(delta.attempt, batch.node)

    def _stray(self, attempt: AttemptId, node: str) -> None:
        """Tokens came for a request that is over, so our cancellation was lost. Send it again, once."""
        self.metrics.count("tokens_stray")
        if attempt not in self._strays:
            self._strays[attempt] = None
            if len(self._strays) > STRAYS_KEPT:
                self._strays.popitem(last=False)
            self._cancel(ev.Cancel(node, attempt, "the request is over"))

    def _tell_all(self, event: Event) -> None:
        for generation in list(self.running.values()):
            generation.feed_all(event)

    def _cancel(self, command: ev.Cancel) -> None:
        """Send the cancellation. This outlives the request: the node must hear of it even if the front is gone."""
        self._tasks.create_task(self._publish_cancel(command))

    async def _publish_cancel(self, command: ev.Cancel) -> None:
        try:
            await self._bus.publish(
                subjects.cancel(command.node), CancelAttempt(command.attempt, command.reason)
            )
        except TsukimiError as e:  # the lease ends it: the node does not get our heartbeats either
            log.warning("cancel_not_sent", node=command.node, attempt=command.attempt, error=str(e))


def choice_of(attempt: AttemptId) -> int:
    parts = attempt.split("/")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 1 << 30
