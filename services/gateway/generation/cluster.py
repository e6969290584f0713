"""What a gateway knows of the cluster: who is alive, which models are served, and whether a request can be served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from msgspec import Struct

from shared.core.conductor.membership import Change, Member, Membership
from shared.core.conductor.served_models import chosen_specs, kv_kind
from shared.core.machine import BusFound, BusLost, Event
from shared.core.request import events as ev
from shared.io.bus import Bus
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import NodeId
from shared.protocol.model import ModelSpec
from shared.text.text import TextModel

log = structlog.get_logger(__name__)

LoadText = Callable[[ModelSpec], TextModel]
"""Blocks; raises Invalid."""
LOOK_S = 0.25
RETRY_TEXT_S = 5.0


class ServedModel(Struct, frozen=True):
    spec: ModelSpec
    text: TextModel


class Cluster:
    """Follows announcements and heartbeats. `tell` gets lost lives and bus changes, for all running requests."""

    def __init__(
        self, bus: Bus, node: NodeId, lost_after_s: float, load_text: LoadText, tell: Callable[[Event], None]
    ) -> None:
        self.members = Membership(lost_after_s)
        self.models: dict[str, ServedModel] = {}
        """Models by name. A model that was served once stays: its nodes may return before a request's time is up."""
        self.some_model = asyncio.Event()
        """Set once a model is served."""
        self.problem = ""
        """Why this gateway cannot serve an announced model."""
        self._bus = bus
        self._node = node
        self._suspect_after_s = lost_after_s / 2
        self._suspected: set[tuple[NodeId, str]] = set()
        self._load_text = load_text
        self._tell = tell
        self._roll_call_due = True
        self._wanted: dict[str, ModelSpec] = {}
        self._retry_text_at = 0.0

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self._bus.on_connection(self._on_connection)
        await self._bus.subscribe_ordered(subjects.ANNOUNCE, NodeInfo, self._on_info)
        await self._bus.subscribe_ordered(subjects.LEAVE, NodeLeft, self._on_left)
        await self._bus.subscribe_ordered(subjects.HEARTBEAT_ALL, NodeLoad, self._on_load)
        tasks.create_task(self._look())

    def most_tokens(self, spec: ModelSpec) -> int:
        """Length, in tokens, of the longest sequence that any decode node has room for."""
        blocks = [m.info.kv_blocks for m in self.members if m.info.role == "decode" and serves(m, spec.name)]
        return max(blocks, default=0) * spec.layout.block_tokens or spec.context_tokens

    def missing(self) -> list[str]:
        """Why a request could not be served now; empty when ready."""
        what = [] if self._bus.connected else ["the bus is not connected"]
        if not self.members.ready("conductor"):
            what.append(self._stage_of("conductor"))
        if not self.members.ready("decode"):
            what.append(self._stage_of("decode"))
        if any(m.info.role == "prefill" for m in self.members) and not self.members.ready("prefill"):
            what.append(self._stage_of("prefill"))
        if not self.models:
            what.append(self.problem or "no model is announced")
        return what

    def _stage_of(self, role: str) -> str:
        stages = [m.stage if m.alive else "lost" for m in self.members if m.info.role == role]
        return f"{role}: {', '.join(stages) or 'none announced'}"

    # -- news --------------------------------------------------------------------------------------------------------

    def _on_info(self, info: NodeInfo) -> None:
        self._pass_on(self.members.announced(info, time.monotonic()))

    def _on_load(self, load: NodeLoad) -> None:
        self._pass_on(self.members.loaded(load, time.monotonic()))

    def _on_left(self, left: NodeLeft) -> None:
        self._pass_on(self.members.departed(left.node, left.incarnation))

    def _on_connection(self, up: bool) -> None:
        if up:
            self.members.bus_found(time.monotonic())
            self._roll_call_due = True
        else:
            self.members.bus_lost()
        self._tell(BusFound() if up else BusLost())

    def _pass_on(self, changes: list[Change]) -> None:
        for change in changes:
            log.info("node_" + change.kind, node=change.ref.node, role=change.role, stage=change.stage)
            if change.kind in ("lost", "left"):
                self._tell(ev.NodeLost(change.ref.node, change.ref.incarnation))

    async def _look(self) -> None:
        while True:
            now = time.monotonic()
            self._pass_on(self.members.ticked(now))
            self._suspect(now)
            if (self._roll_call_due or self.members.strangers) and self._bus.connected:
                self._roll_call_due = self.members.strangers = False
                await self._call_roll()
            self._wanted = self._unserved()
            if self._wanted and now >= self._retry_text_at:
                await self._load()
            await asyncio.sleep(LOOK_S)

    def _suspect(self, now: float) -> None:
        late = {
            (m.ref.node, m.ref.incarnation)
            for m in self.members
            if m.alive and now - m.seen_s > self._suspect_after_s and self._bus.connected
        }
        for node, incarnation in late - self._suspected:
            self._tell(ev.NodeSuspected(node, incarnation))
        self._suspected = late

    async def _call_roll(self) -> None:
        try:
            await self._bus.publish(subjects.ROLL_CALL, RollCall(self._node))
        except TsukimiError as e:
            log.warning("roll_call_failed", error=str(e))
            self._roll_call_due = True

    # -- models ------------------------------------------------------------------------------------------------------

    def _unserved(self) -> dict[str, ModelSpec]:
        """The chosen specs that are not served yet, and those wanted before whose nodes are all lost for now.

        One served is as good as the chosen one while its KV is of the same kind and somebody alive announces it."""
        announced = [m.info.model for m in self.members if m.alive]
        chosen = chosen_specs(self.members)
        wanted = {name: spec for name, spec in self._wanted.items() if name not in chosen}
        for name, spec in chosen.items():
            served = self.models.get(name)
            if served is None or kv_kind(served.spec) != kv_kind(spec) or served.spec not in announced:
                wanted[name] = spec
        return wanted

    async def _load(self) -> None:
        for name, spec in list(self._wanted.items()):
            try:
                text = await asyncio.to_thread(self._load_text, spec)
            except TsukimiError as e:
                self.problem = f"{name}: {e.message}"
                log.error("model_not_servable", model=name, error=e.message)
                self._retry_text_at = time.monotonic() + RETRY_TEXT_S
                continue
            self._wanted.pop(name)
            self.problem = ""
            self.models[name] = ServedModel(spec, text)
            self.some_model.set()
            log.info("model_served", model=name, path=spec.path, context_tokens=spec.context_tokens)


def serves(member: Member, model: str) -> bool:
    return member.info.model is not None and member.info.model.name == model
