"""Engines of one machine that share its cores: the more of them run, the slower each one is.

On a small machine a prefill makes the decode steps beside it longer. All running engines are slowed alike, so they share
one clock of work: it goes as fast as time while at most `cores` engines run, and slower in proportion beyond that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from tsukimi.simulate.timeline import Timeline


class SharedCores:
    """A clock of work. What is due at a moment of work is called when that work is done."""

    def __init__(self, timeline: Timeline, cores: float) -> None:
        """`cores`: how many engines run at full speed side by side. It may be a fraction, for engines that also share
        memory bandwidth or the two threads of a core."""
        self._timeline = timeline
        self._cores = cores
        self._running = 0
        self._work_s = 0.0
        self._as_of_s = 0.0
        """The time at which `_work_s` was right."""
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._pushed = 0
        self._planned = 0

    @property
    def now(self) -> float:
        """Work done so far, in seconds of an engine alone."""
        return self._work_s + (self._timeline.now - self._as_of_s) * self._speed

    def begin(self) -> None:
        """One more engine runs."""
        self._advance()
        self._running += 1
        self._plan()

    def end(self) -> None:
        self._advance()
        self._running -= 1
        assert self._running >= 0, "more engines ended than began"
        self._plan()

    def at(self, work_s: float, do: Callable[[Any], None], argument: Any = None) -> None:
        """Call `do(argument)` when so much work is done. The caller's engine runs."""
        self._pushed += 1
        heapq.heappush(self._due, (work_s, self._pushed, do, argument))
        self._advance()
        self._plan()

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / self._running) if self._running else 1.0

    def _advance(self) -> None:
        self._work_s, self._as_of_s = self.now, self._timeline.now

    def _plan(self) -> None:
        """Wake up for what is due next, at the present speed. Earlier plans are void."""
        self._planned += 1
        if self._due:
            left_s = max(0.0, self._due[0][0] - self._work_s)
            self._timeline.at(self._timeline.now + left_s / self._speed, self._reached, self._planned)

    def _reached(self, plan: int) -> None:
        if plan != self._planned:
            return
        work_s, _, do, argument = heapq.heappop(self._due)
        self._work_s, self._as_of_s = max(self._work_s, work_s), self._timeline.now
        do(argument)
        self._advance()
        self._plan()
