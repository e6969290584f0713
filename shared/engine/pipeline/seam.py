"""Where a piece goes from one stage to the next. Pure: link and threads are in onward.

Two neighbouring stages both have the layers around their border, the seam. A piece is handed on within it as soon as the
next stage is about to run out of work: so neither waits for the other while their speeds differ by no more than the seam
is wide. (A fixed border makes the group as slow as its slowest process, and whoever shares a machine is slow in turns.)
"""

from __future__ import annotations

from enum import Enum, auto

MOST_WAITING = 4
"""Pieces handed on that the next stage has not begun."""


class Turn(Enum):
    COMPUTE = auto()
    HAND_ON = auto()
    WAIT = auto()
    """Ask again when something was heard."""


class Seam:
    """What the sending side knows, and decides. It hands on in front of layer `earliest` at the earliest, and of `latest`
    at the latest.

    A layer of a piece needs K and V of the pieces before it: it is computed once the next stage has written them, if that
    stage was to.
    """

    def __init__(self, earliest: int, latest: int) -> None:
        self.earliest = earliest
        self.latest = latest
        self._sent = 0
        """Pieces handed on so far."""
        self._begun = 0
        """Of them, those that the next stage has begun or is done with."""
        self._written = latest
        """In front of this layer it has written K and V of the latest piece that it has begun."""
        self._ending = True
        """It is about to be done with that one."""
        self._border = latest
        """Where the latest piece was handed on."""

    def begin_step(self) -> None:
        """Nothing is under way: all that was computed is written."""
        self._border = self.latest

    def heard(self, begun: int, written: int, ending: bool) -> None:
        """The next stage tells how far it is."""
        self._begun, self._written, self._ending = begun, written, ending

    def turn(self, layer: int) -> Turn:
        """What is done with a piece that has come in front of this layer, one of earliest..latest."""
        waiting = self._sent - self._begun
        if waiting == 0 and self._ending:
            return Turn.HAND_ON
        if layer == self.latest:
            return Turn.HAND_ON if waiting < MOST_WAITING else Turn.WAIT
        # Not handed on while the next stage is busy: the earlier a piece goes, the later that one would catch up.
        written = layer < self._border or (waiting == 0 and layer < self._written)
        return Turn.COMPUTE if written else Turn.WAIT

    def handed_on(self, layer: int) -> None:
        self._sent += 1
        self._border = layer
