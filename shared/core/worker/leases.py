"""Who still owns what, and when to look: attempts live as long as the life of the gateway that made them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shared.protocol.ids import AttemptId, Incarnation, NodeId

REMEMBERED_LIVES = 8
PAUSE_S = 1.0
"""A longer time between two looks is a pause of our own process, unless leases are longer than twice that."""


@dataclass(slots=True, eq=False)
class _Owner:
    incarnation: Incarnation
    seen_at: float
    attempts: set[AttemptId] = field(default_factory=set)
    past: deque[Incarnation] = field(default_factory=lambda: deque(maxlen=REMEMBERED_LIVES))


class GatewayLeases:
    """A gateway's heartbeats are the lease of all its attempts. Leases do not age while the bus is lost."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._owners: dict[NodeId, _Owner] = {}
        self._frozen = False
        self._looked_at: float | None = None

    def hold(self, gateway: NodeId, incarnation: Incarnation, attempt: AttemptId, now: float) -> bool:
        """Put an attempt under its gateway's lease. False if that life of the gateway is known to be over.

        `seen` with the same life must have been called first when a new life may be meant: it ends the old one's."""
        owner = self._owners.get(gateway)
        if owner is None:
            owner = self._owners[gateway] = _Owner(incarnation, now)
        if owner.incarnation != incarnation:
            return False
        if now > owner.seen_at:
            owner.seen_at = now
        owner.attempts.add(attempt)
        return True

    def drop(self, gateway: NodeId, attempt: AttemptId) -> None:
        """The attempt is over. Idempotent."""
        owner = self._owners.get(gateway)
        if owner is not None:
            owner.attempts.discard(attempt)

    def seen(self, gateway: NodeId, incarnation: Incarnation, now: float) -> list[AttemptId]:
        """A sign of life. Returns the attempts orphaned because it is a new life; an old life's late sign is ignored."""
        owner = self._owners.get(gateway)
        if owner is None:
            self._owners[gateway] = _Owner(incarnation, now)
            return []
        if owner.incarnation == incarnation:
            owner.seen_at = now
            return []
        if incarnation in owner.past:
            return []
        orphans = sorted(owner.attempts)
        owner.past.append(owner.incarnation)
        owner.incarnation, owner.seen_at, owner.attempts = incarnation, now, set()
        return orphans

    def lapsed(self, now: float) -> list[AttemptId]:
        """Attempts of gateways not seen for a lease; those gateways are forgotten. After a pause of our own process every
        gateway has a whole lease again: nobody listened for it. Call a few times a second."""
        before, self._looked_at = self._looked_at, now
        if self._frozen:
            return []
        if before is not None and now - before > max(PAUSE_S, self._lease_s / 2):
            self.thaw(now)
            return []
        gone = [node for node, owner in self._owners.items() if now - owner.seen_at > self._lease_s]
        orphans: list[AttemptId] = []
        for node in gone:
            orphans.extend(sorted(self._owners.pop(node).attempts))
        return orphans

    def freeze(self) -> None:
        self._frozen = True

    def thaw(self, now: float) -> None:
        """The bus is back: every gateway has a whole lease to show itself again."""
        self._frozen = False
        for owner in self._owners.values():
            owner.seen_at = now

    def attempts(self) -> set[AttemptId]:
        return set().union(*(owner.attempts for owner in self._owners.values()))


class Timers:
    """Moments at which attempts are to be looked at, any number for each. None is taken back: whoever is woken asks if
    it still matters."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, AttemptId]] = []
        self._count = 0

    def set(self, at: float, attempt: AttemptId) -> None:
        self._count += 1
        heappush(self._timers, (at, self._count, attempt))

    def due(self, now: float) -> Iterator[AttemptId]:
        """Takes out those whose time has come, earliest first; of one time, the one that was set first."""
        while self._timers and self._timers[0][0] <= now:
            yield heappop(self._timers)[2]
