"""Who is there: announcements and heartbeats in, changes out.

A node has one current life (incarnation) at a time. A new life ends the old one, and messages from an ended life are
ignored. A life without a heartbeat for `lost_after_s` is lost until it is heard again. While our own bus connection is
down no life is declared lost; when it is back, every live one has `lost_after_s` again to be heard. The same holds
after a pause of our own process: what we did not listen for was not silence.

A life that was said to have left and then sends a newer heartbeat has not left: whoever said so was wrong, or not the
node. It is asked to announce itself again.

Used by the conductor, by gateways and by `tsukimi status`. Knows nothing about what the nodes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shared.protocol.cluster import NodeInfo, NodeLoad, Stage
from shared.protocol.ids import Incarnation, NodeId, NodeRef, Role

ChangeKind = Literal["joined", "stage", "lost", "returned", "left"]

ENDED_KEPT = 16
"""How many ended lives are remembered per node, so that their late messages are recognised."""


PAUSE_S = 1.0
"""A longer time between two ticks is a pause of our own process, unless nodes may be silent for longer than twice
that."""


@dataclass(slots=True, frozen=True)
class Change:
    """What happened to a life of a node. `left` also means that a new life replaced it."""

    kind: ChangeKind
    role: Role
    ref: NodeRef
    stage: Stage


@dataclass(slots=True, eq=False)
class Member:
    """A node's current life. Read-only for everyone but Membership."""

    info: NodeInfo
    stage: Stage
    seen_s: float
    load: NodeLoad | None = None
    alive: bool = True

    @property
    def ref(self) -> NodeRef:
        return self.info.ref

    @property
    def ready(self) -> bool:
        """May be given work."""
        return self.alive and self.stage == "ready"


class Membership:
    """Methods return the changes they caused, in order. Repeated and outdated messages cause none."""

    def __init__(self, lost_after_s: float, forget_after_s: float = 900.0) -> None:
        self.lost_after_s = lost_after_s
        self.forget_after_s = forget_after_s
        self._members: dict[NodeId, Member] = {}
        self._ended: dict[NodeId, list[Incarnation]] = {}
        self._said_to_leave: dict[NodeId, tuple[Incarnation, int]] = {}
        """Lives that ended by word, with the last heartbeat's seq."""
        self._ticked_s: float | None = None
        self._deaf_until_s = float("-inf")
        """Until when, at last, nobody could be heard."""
        self._bus_is_down = False
        self.strangers = False
        """True if a heartbeat came from a life that never announced itself: a roll call is due. The caller resets it."""

    # -- what happened -----------------------------------------------------------------------------------------

    def announced(self, info: NodeInfo, now: float) -> list[Change]:
        """An announcement arrived: a start, a stage change, or an answer to a roll call."""
        name = info.ref.node
        if self._has_ended(name, info.ref.incarnation):
            return []
        member = self._members.get(name)
        if member is None or member.ref.incarnation != info.ref.incarnation:
            self._said_to_leave.pop(name, None)
            changes = [] if member is None else self._end(member)
            self._members[name] = member = Member(info=info, stage=info.stage, seen_s=now)
            return [*changes, _change("joined", member)]
        member.info = info
        return self._heard(member, info.stage, now)

    def loaded(self, load: NodeLoad, now: float) -> list[Change]:
        """A heartbeat arrived. One older than the last only shows that the node is alive."""
        member = self._members.get(load.node)
        if member is None or member.info.ref.incarnation != load.incarnation:
            self._heard_stranger(load)
            return []
        if member.load is not None and load.seq <= member.load.seq:
            return self._heard(member, member.stage, now)
        member.load = load
        if member.alive and load.stage == member.stage:  # nearly always
            member.seen_s = now
            return []
        return self._heard(member, load.stage, now)

    def departed(self, node: NodeId, incarnation: Incarnation) -> list[Change]:
        """A life ended gracefully."""
        member = self._members.get(node)
        if member is None or member.ref.incarnation != incarnation:
            return []
        del self._members[node]
        self._said_to_leave[node] = (incarnation, member.load.seq if member.load is not None else 0)
        return self._end(member)

    def ticked(self, now: float) -> list[Change]:
        """Time passed. Call a few times per lost_after_s."""
        before, self._ticked_s = self._ticked_s, now
        if self._bus_is_down:
            return []
        if before is not None and self._is_pause(now - before):
            self._listened_not(now)
            return []
        changes: list[Change] = []
        for name, member in list(self._members.items()):
            silent_s = now - member.seen_s
            if member.alive and silent_s > self.lost_after_s:
                member.alive = False
                changes.append(_change("lost", member))
            elif not member.alive and silent_s > self.forget_after_s:
                del self._members[name]
        return changes

    def bus_lost(self) -> None:
        self._bus_is_down = True

    def bus_found(self, now: float) -> None:
        self._bus_is_down = False
        self._listened_not(now)

    # -- who is there ------------------------------------------------------------------------------------------

    def get(self, node: NodeId) -> Member | None:
        """The current life, alive or lost."""
        return self._members.get(node)

    def is_current(self, node: NodeId, incarnation: Incarnation) -> bool:
        member = self._members.get(node)
        return member is not None and member.ref.incarnation == incarnation

    def up_to_date(self, now: float) -> bool:
        """False just after a pause of our own process or an outage of our bus, until every node that lives was heard."""
        if self._bus_is_down or (self._ticked_s is not None and self._is_pause(now - self._ticked_s)):
            return False
        return now - self._deaf_until_s >= self.lost_after_s

    def __iter__(self) -> Iterator[Member]:
        """All current lives, lost ones included, in the order they joined."""
        return iter(self._members.values())

    def ready(self, role: Role) -> list[Member]:
        """Those that may be given work, in the order they joined."""
        return [m for m in self._members.values() if m.info.role == role and m.ready]

    def check(self) -> None:
        for name, member in self._members.items():
            assert member.ref.node == name, f"{name} is filed under another name"
            assert not self._has_ended(name, member.ref.incarnation), f"{name}'s current life has ended"
            if member.load is not None:
                assert member.load.incarnation == member.ref.incarnation, f"{name} has another life's load"
        for name, ended in self._ended.items():
            assert len(ended) <= ENDED_KEPT, f"too many ended lives of {name}"

    # -- inside ------------------------------------------------------------------------------------------------

    def _is_pause(self, since_tick_s: float) -> bool:
        return since_tick_s > max(PAUSE_S, self.lost_after_s / 2)

    def _listened_not(self, now: float) -> None:
        """Nobody could be heard until now."""
        self._deaf_until_s = now
        for member in self._members.values():
            if member.alive:
                member.seen_s = now

    def _heard_stranger(self, load: NodeLoad) -> None:
        node, life = load.node, load.incarnation
        said = self._said_to_leave.get(node)
        if said is not None and said[0] == life and load.seq > said[1] and node not in self._members:
            del self._said_to_leave[node]
            self._ended[node].remove(life)
        if not self._has_ended(node, life):
            self.strangers = True

    def _heard(self, member: Member, stage: Stage, now: float) -> list[Change]:
        member.seen_s = now
        changes = []
        if not member.alive:
            member.alive = True
            changes.append(_change("returned", member))
        if stage != member.stage and member.stage != "draining":  # draining is final
            member.stage = stage
            changes.append(_change("stage", member))
        return changes

    def _end(self, member: Member) -> list[Change]:
        ended = self._ended.setdefault(member.ref.node, [])
        ended.append(member.ref.incarnation)
        del ended[:-ENDED_KEPT]
        return [_change("left", member)]

    def _has_ended(self, node: NodeId, incarnation: Incarnation) -> bool:
        return incarnation in self._ended.get(node, ())


def _change(kind: ChangeKind, member: Member) -> Change:
    return Change(kind=kind, role=member.info.role, ref=member.ref, stage=member.stage)
