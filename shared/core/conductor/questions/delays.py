"""How long a question was on its way, by the asker's own clock.

Two monotonic clocks differ by a constant, give or take a drift. The shortest way lately seen from an asker is taken for
that constant, and what a question took longer than this, it waited: in a socket, in a queue, or while our own process was
stopped. No clock has to be set right, and none may jump. A guess too low costs little: the question is answered as a
fresh one.
"""

from __future__ import annotations

from collections import OrderedDict

from shared.protocol.ids import Incarnation

WINDOW_S = 30.0
"""The shortest way is that of the present and of the previous window. An asker whose clock stood still (its machine was
suspended) seems late for no longer than these."""
FORGET_S = 600.0
"""An asker not heard for so long is as good as new: by then the clocks may have drifted."""
MOST_ASKERS = 1024

_NEVER = float("inf")


class _Ways:
    """Differences between the two clocks, as seen from one asker."""

    __slots__ = ("before_s", "began_s", "heard_s", "least_s")

    def __init__(self, now: float) -> None:
        self.began_s = self.heard_s = now
        self.before_s = self.least_s = _NEVER

    def heard(self, difference_s: float, now: float) -> float:
        if now - self.began_s > WINDOW_S:
            self.before_s, self.least_s, self.began_s = self.least_s, _NEVER, now
        self.heard_s = now
        self.least_s = min(self.least_s, difference_s)
        return difference_s - min(self.least_s, self.before_s)


class Delays:
    """Of all askers' questions. Remembers at most MOST_ASKERS, those heard last."""

    def __init__(self) -> None:
        self._askers: OrderedDict[Incarnation, _Ways] = OrderedDict()

    def delay_s(self, asker: Incarnation, asked_at_s: float, now: float) -> float:
        """Seconds that a question waited, at least. `asked_at_s` is by the asker's monotonic clock, `now` by ours."""
        ways = self._askers.get(asker)
        if ways is None or now - ways.heard_s > FORGET_S:
            ways = self._askers[asker] = _Ways(now)
            if len(self._askers) > MOST_ASKERS:
                self._askers.popitem(last=False)
        self._askers.move_to_end(asker)
        return ways.heard(now - asked_at_s, now)

    def __len__(self) -> int:
        return len(self._askers)
