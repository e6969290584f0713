"""Moments at which attempts are to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from shared.protocol.ids import AttemptId


class Timers:
    """Any number for each attempt. None is taken back: whoever is woken asks whether it still matters."""

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
