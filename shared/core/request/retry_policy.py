"""How long a request keeps trying: pauses that grow, lives to keep away from, and when enough is enough."""

from __future__ import annotations

from shared.core.request.events import LifecycleConfig
from shared.protocol.errors import WireError
from shared.protocol.ids import Incarnation, NodeId

FINAL = frozenset({"invalid", "too_large", "refused", "internal", "cancelled"})
"""Codes that no other node or moment would change. Anything else is tried again."""

AVOID_S = 10.0
"""How long a life that failed is kept out of placements; by then the conductor knows of truly lost ones."""


class RetryPolicy:
    """Tally of one request's failures since its last new token."""

    def __init__(self, config: LifecycleConfig) -> None:
        self.config = config
        self.retry = False
        """Something accepted us before: from now on this is a failover, no new request."""
        self.kept_waiting = False
        """Nobody gave us an answer for a while: the conductor, or all nodes, were away."""
        self.last_error = WireError("unavailable", "no node answered in time")
        self._failures = 0
        self.moves = 0
        """How often a node gave the answer up."""
        self._overloads = 0
        self._losses = 0
        self._avoid: dict[tuple[NodeId, Incarnation], float] = {}

    @property
    def waits(self) -> bool:
        """Whether the request waits for its place as long as its budget lasts, however loaded the nodes are. A new one
        does not: its client may come back later. One that was kept waiting, or is being answered, does."""
        return self.retry or self.kept_waiting

    def progressed(self) -> None:
        self.retry = True
        self._failures = self._losses = 0

    def failed(self, error: WireError) -> float:
        """Note a failure; returns the pause before the next try (the first is made at once)."""
        overloaded = error.code == "overloaded"
        self.last_error = error if overloaded else WireError("unavailable", error.message)
        self._failures += 1
        if self._failures == 1 and not overloaded:
            return 0.0
        doublings = min(self._failures - 1, 30)
        return min(self.config.backoff_first_s * 2.0**doublings, self.config.backoff_most_s)

    def moved(self) -> None:
        """A node took us in and gave us up."""
        self.retry = True
        self.moves += 1

    def overloaded(self) -> bool:
        """A place turned out full; True if the request has to be refused."""
        self._overloads += 1
        return self._overloads > self.config.overloads_most

    def lost(self) -> bool:
        """A node was lost under the request; True if the request is the likely cause."""
        self.retry = True
        self._losses += 1
        return self._losses > self.config.losses_most

    def avoid(self, life: tuple[NodeId, Incarnation] | None, now: float) -> None:
        if life is not None:
            self._avoid[life] = now + AVOID_S

    def avoid_none(self) -> None:
        """Perhaps only what we avoid is left."""
        self._avoid.clear()

    def avoided(self, now: float) -> tuple[tuple[NodeId, Incarnation], ...]:
        self._avoid = {life: until for life, until in self._avoid.items() if until > now}
        return tuple(self._avoid)
