"""The conductor on the bus: messages to events, commands to messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import structlog

from services.conductor.config import Config
from shared.core.conductor.events import (
    AskSnapshot,
    BlocksChanged,
    CallRoll,
    ConductorStarted,
    GivenUp,
    LoadReported,
    NodeAnnounced,
    NodeDeparted,
    NoticeNode,
    NoticePolicyFailed,
    PlaceAsked,
    ReplyPlacement,
    ReplyRefusal,
    SnapshotArrived,
)
from shared.core.conductor.machine import ConductorEvent, ConductorMachine
from shared.core.machine import Ask, BusFound, BusLost, Ticked
from shared.io.bus import Subscription
from shared.io.driver import Driver
from shared.io.plugins.policies import load_policies
from shared.io.service import Context
from shared.protocol import subjects
from shared.protocol.cluster import (
    BlockEvents,
    BlockSnapshotPart,
    NodeInfo,
    NodeLeft,
    NodeLoad,
    RollCall,
    SnapshotAsked,
    Stage,
)
from shared.protocol.errors import TsukimiError, WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import PlaceGivenUp, Placement, PlaceRequest

TICK_S = 0.25
SETTLE_STEP_S = 0.02
POLICY_FAILURES_LOGGED = 100
"""Only the first failure of the policy is logged, and then one of so many."""

log = structlog.get_logger(__name__)


class ConductorApp:
    """Answers PLACE from what it has heard. After a restart its picture is complete within `settle_s`."""

    def __init__(self, ctx: Context, config: Config) -> None:
        self._ctx = ctx
        self._config = config
        self._stage: Stage = "starting"
        load_policies(config.machine())
        self._machine = ConductorMachine(config.machine())
        self._driver: Driver[ConductorEvent] = Driver(
            self._machine, self._execute, tasks=ctx.tasks, recorder=ctx.recorder
        )
        self._asks = itertools.count(1)
        self._answers: dict[Ask, Placement | WireError] = {}
        self._place: Subscription | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def info(self) -> NodeInfo:
        ref = NodeRef(node=self._ctx.node, incarnation=self._ctx.incarnation, host=self._ctx.host)
        return NodeInfo(ref=ref, role="conductor", stage=self._stage, detail=self._config.policy)

    def load(self, seq: int) -> NodeLoad:
        machine = self._machine
        return NodeLoad(
            node=self._ctx.node,
            incarnation=self._ctx.incarnation,
            role="conductor",
            seq=seq,
            stage=self._stage,
            counters={
                "placed": machine.placed,
                "refused": machine.refused,
                "let_through": machine.let_through,
                "expired": machine.expired,
                "policy_failures": machine.policy_failures,
                "blocks_indexed": len(machine.index),
                "block_event_gaps": machine.streams.gaps,
                **self._ctx.bus.counters,
            },
        )

    async def start(self) -> None:
        bus, feed = self._ctx.bus, self._driver.feed
        bus.on_connection(lambda up: feed(BusFound() if up else BusLost()))
        await bus.subscribe_ordered(subjects.ANNOUNCE, NodeInfo, lambda m: feed(NodeAnnounced(m)))
        await bus.subscribe_ordered(
            subjects.LEAVE, NodeLeft, lambda m: feed(NodeDeparted(m.node, m.incarnation))
        )
        await bus.subscribe_ordered(subjects.HEARTBEAT_ALL, NodeLoad, lambda m: feed(LoadReported(m)))
        await bus.subscribe_ordered(subjects.BLOCKS_ALL, BlockEvents | BlockSnapshotPart, self._on_blocks)
        await bus.subscribe_ordered(subjects.PLACE_GIVEN_UP, PlaceGivenUp, lambda m: feed(GivenUp(m.attempt)))
        self._ctx.tasks.create_task(self._driver.tick(Ticked(), TICK_S))
        feed(ConductorStarted())
        await self._settle()
        self._place = await bus.subscribe(
            subjects.PLACE, PlaceRequest, self._on_place, queue=subjects.QUEUE_CONDUCTOR
        )
        await self._set_stage("ready")

    async def drain(self, grace_s: float) -> None:
        await self._set_stage("draining")
        if self._place is not None:
            await self._place.unsubscribe()

    async def close(self) -> None:
        self._place = None

    async def _settle(self) -> None:
        """Wait for the answers to the roll call and for the snapshots, so that the first placements know the pool."""
        await asyncio.sleep(min(SETTLE_STEP_S * 5, self._config.settle_s))
        for _ in range(int(self._config.settle_s / SETTLE_STEP_S)):
            if self._machine.complete:
                return
            await asyncio.sleep(SETTLE_STEP_S)

    async def _set_stage(self, stage: Stage) -> None:
        self._stage = stage
        await self._ctx.announce_now()

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _on_place(self, request: PlaceRequest) -> Placement:
        ask = next(self._asks)
        self._driver.feed(PlaceAsked(request, ask))
        answer = self._answers.pop(ask)
        if isinstance(answer, WireError):
            raise answer.to_exception()
        return answer

    def _on_blocks(self, message: BlockEvents | BlockSnapshotPart) -> None:
        self._driver.feed(
            BlocksChanged(message) if isinstance(message, BlockEvents) else SnapshotArrived(message)
        )

    def _execute(self, command: Any) -> Awaitable[None] | None:
        match command:
            case ReplyPlacement(ask=ask, placement=placement):
                self._answers[ask] = placement
            case ReplyRefusal(ask=ask, error=error):
                self._answers[ask] = error
                log.info(
                    "place_refused", code=error.code, reason=error.message, retry_after_s=error.retry_after_s
                )
            case NoticeNode(ref=ref, what=what, detail=detail):
                level = log.warning if what in ("lost", "suspect", "foreign") else log.info
                level("node_changed", about=ref.node, life=ref.incarnation, what=what, detail=detail)
            case NoticePolicyFailed(attempt=attempt, error=error_text):
                if self._machine.policy_failures % POLICY_FAILURES_LOGGED == 1:
                    total = self._machine.policy_failures
                    log.error("policy_failed", attempt=attempt, error=error_text, total=total)
            case AskSnapshot(node=node):
                return self._publish(subjects.snapshot(node), SnapshotAsked(self._ctx.node))
            case CallRoll():
                return self._publish(subjects.ROLL_CALL, RollCall(self._ctx.node))
        return None

    async def _publish(self, subject: str, message: Any) -> None:
        """The machine asks again for lost ones."""
        try:
            await self._ctx.bus.publish(subject, message)
        except TsukimiError as e:
            log.warning("not_published", subject=subject, error=str(e))
