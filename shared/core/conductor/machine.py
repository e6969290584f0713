"""The conductor: knows who is there, what they hold and how busy they are, and places every request.

Its state is soft. Nothing is written anywhere: a new conductor calls the roll and asks for snapshots, and knows
everything again within a heartbeat. Until then it answers with what it knows; a wrong guess costs time, never an
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.core.conductor.block_index import BlockIndex
from shared.core.conductor.block_sync import BlockSync
from shared.core.conductor.decode_policies import decode_policy_named
from shared.core.conductor.events import (
    AskSnapshot,
    BlocksChanged,
    CallRoll,
    ConductorConfig,
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
from shared.core.conductor.membership import Change, Membership
from shared.core.conductor.node_registry import NodeRegistry
from shared.core.conductor.placement_policies import FALLBACK, Policy, policy_named
from shared.core.conductor.policy_options import PolicyOptions
from shared.core.conductor.questions.waited_for import WaitedFor
from shared.core.conductor.scheduler import Scheduler
from shared.core.machine import BusFound, BusLost, Ticked
from shared.protocol.errors import TsukimiError, WireError
from shared.protocol.ids import NodeId

ConductorEvent = (
    ConductorStarted
    | NodeAnnounced
    | LoadReported
    | NodeDeparted
    | BlocksChanged
    | SnapshotArrived
    | PlaceAsked
    | GivenUp
    | Ticked
    | BusLost
    | BusFound
)
ConductorCommand = ReplyPlacement | ReplyRefusal | AskSnapshot | CallRoll | NoticeNode | NoticePolicyFailed

ROLL_AGAIN_S = 1.0
"""Strangers are called to announce themselves at most that often."""
RETURNED_S = 0.5
"""When to ask again after an answer of a conductor that was away."""
HOLDERS = ("prefill", "decode", "cache")


class ConductorMachine:
    """Events in, commands out; every PlaceAsked is answered at once."""

    def __init__(self, config: ConductorConfig, policy: Policy | None = None) -> None:
        options = PolicyOptions(config.balancing_threshold, config.seed, config.patience)
        self.config = config
        self.membership = Membership(config.lost_after_s)
        self.index = BlockIndex(config.index_blocks)
        self.streams = BlockSync(self.index)
        self.registry = NodeRegistry(config.stale_s, config.prior)
        self._scheduler = Scheduler(
            config,
            policy or policy_named(config.policy, options),
            policy_named(FALLBACK, options),
            decode_policy_named(config.decode_policy, options),
            self.registry,
            self.index,
        )
        self._waited_for = WaitedFor()
        self._rolled_s = float("-inf")
        self.placed = 0
        self.refused = 0
        self.expired = 0
        """Questions that nobody waited for any more when they were read."""
        self.policy_failures = 0
        self._handlers: dict[type, Callable[[Any, float], list[Any]]] = {
            PlaceAsked: self._place,
            GivenUp: self._on_given_up,
            LoadReported: self._on_load_reported,
            BlocksChanged: self._on_blocks_changed,
            SnapshotArrived: self._on_snapshot_arrived,
            NodeAnnounced: self._on_node_announced,
            NodeDeparted: self._on_node_departed,
            Ticked: self._on_ticked,
            ConductorStarted: self._on_started,
            BusLost: self._on_bus_lost,
            BusFound: self._on_bus_found,
        }

    def handle(self, event: ConductorEvent, now: float) -> list[Any]:
        return self._handlers[type(event)](event, now)

    def _on_given_up(self, event: GivenUp, now: float) -> list[Any]:
        self._waited_for.given_up(event.attempt)
        self._scheduler.given_up(event.attempt, now)
        return []

    def _on_load_reported(self, event: LoadReported, now: float) -> list[Any]:
        load = event.load
        changes = self.membership.loaded(load, now)
        commands = self._changed(changes, now) if changes else []
        member = self.membership.get(load.node)
        if member is not None and member.load is load:  # neither outdated nor another life's
            node_state = self.registry.reported(load, now)
            if node_state is not None:
                self._scheduler.forecast.reported(node_state, load, now)
        self.streams.heartbeat(load.node, load.incarnation, load.block_events_seq, now)
        if self.streams.behind or self.membership.strangers:
            commands += self._wishes(now)
        return commands

    def _on_blocks_changed(self, event: BlocksChanged, now: float) -> list[Any]:
        self.streams.changed(event.events)
        return self._wishes(now) if not self.streams.synced(event.events.node) else []

    def _on_snapshot_arrived(self, event: SnapshotArrived, now: float) -> list[Any]:
        self.streams.snapshot_arrived(event.part)
        return []

    def _on_node_announced(self, event: NodeAnnounced, now: float) -> list[Any]:
        changes = self.membership.announced(event.info, now)
        return self._changed(changes, now, anew=True) + self._wishes(now)

    def _on_node_departed(self, event: NodeDeparted, now: float) -> list[Any]:
        return self._changed(self.membership.departed(event.node, event.incarnation), now)

    def _on_ticked(self, event: Ticked, now: float) -> list[Any]:
        return self._changed(self.membership.ticked(now), now) + self._wishes(now)

    def _on_started(self, event: ConductorStarted, now: float) -> list[Any]:
        return [self._roll(now)]

    def _on_bus_lost(self, event: BusLost, now: float) -> list[Any]:
        self.membership.bus_lost()
        return []

    def _on_bus_found(self, event: BusFound, now: float) -> list[Any]:
        self.membership.bus_found(now)
        return [self._roll(now)]

    def check(self) -> None:
        self.membership.check()
        self.streams.check()
        self.registry.check()
        self._waited_for.check()
        self._scheduler.forecast.check()

    @property
    def let_through(self) -> int:
        """Requests over an objective that were taken because the prediction was not to be trusted."""
        return self._scheduler.admission.let_through

    @property
    def complete(self) -> bool:
        """Everybody who is known has said what it holds, and somebody is."""
        holders = [m for m in self.membership if m.alive and m.info.role in HOLDERS]
        return bool(holders) and all(m.load and self.streams.synced(m.ref.node) for m in holders)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _place(self, event: PlaceAsked, now: float) -> list[Any]:
        if why := self._waited_for.too_late(event.request, now):
            self.expired += 1
            return [ReplyRefusal(event.ask, WireError("deadline_exceeded", why))]
        commands = self._suspect(event) if event.request.avoid else []
        reply: ReplyPlacement | ReplyRefusal
        try:
            reply = ReplyPlacement(event.ask, self._scheduler.place(event.request, now))
            self.placed += 1
        except TsukimiError as refusal:
            reply = ReplyRefusal(event.ask, self._judgement(refusal.to_wire(), now))
            self.refused += 1
        if error := self._scheduler.policy_error:
            self.policy_failures += 1
            commands.append(NoticePolicyFailed(event.request.attempt, error))
        return [*commands, reply]

    def _judgement(self, error: WireError, now: float) -> WireError:
        """Just back from a pause or an outage, we know only how loaded the nodes were before: ask again."""
        if error.code != "overloaded" or self.membership.up_to_date(now):
            return error
        return WireError("unavailable", f"the conductor was away: {error.message}", retry_after_s=RETURNED_S)

    def _suspect(self, event: PlaceAsked) -> list[Any]:
        """What just failed for one request is not tried on the next, until it is heard again."""
        notices: list[Any] = []
        for node, incarnation in event.request.avoid:
            node_state = self.registry.node_state(node, incarnation)
            if node_state is not None and not node_state.suspect:
                node_state.suspect = True
                notices.append(NoticeNode(ref=node_state.ref, what="suspect", detail=event.request.attempt))
        return notices

    def _changed(self, changes: list[Change], now: float, *, anew: bool = False) -> list[Any]:
        """Follow membership: who is gone holds nothing, who comes is listened to."""
        commands: list[Any] = []
        if not changes and not anew:
            return commands
        for change in changes:
            commands.append(NoticeNode(ref=change.ref, what=change.kind, detail=change.stage))
            if change.role not in HOLDERS:
                continue
            if change.kind in ("joined", "returned"):
                self.streams.opened(change.ref.node, change.ref.incarnation)
            elif change.kind in ("left", "lost"):
                self.streams.closed(change.ref.node)
        foreign = self.registry.rebuild(self.membership)
        self._scheduler.forecast.keep(self.registry.node_states())
        for ref in foreign:
            commands.append(
                NoticeNode(ref=ref, what="foreign", detail="its KVCache does not fit its model's others")
            )
        return commands

    def _wishes(self, now: float) -> list[Any]:
        """Whatever is missing and may be asked for now."""
        wanted: list[NodeId] = self.streams.asks(now)
        commands: list[Any] = [AskSnapshot(node=node) for node in wanted]
        if self.membership.strangers and now - self._rolled_s >= ROLL_AGAIN_S:
            commands.append(self._roll(now))
        return commands

    def _roll(self, now: float) -> CallRoll:
        self._rolled_s = now
        self.membership.strangers = False
        return CallRoll()
