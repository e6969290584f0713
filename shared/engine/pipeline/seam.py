"""Where a piece goes from one stage to the next. Pure: link and threads are in onward.

Two neighbouring stages both have the layers around their border, the seam. A piece is handed on within it as soon as the
next stage is about to run out of work: so neither waits for the other while their speeds differ by no more than the seam
is wide. (A fixed border makes the group as slow as its slowest process, and whoever shares a machine is slow in turns.)
"""

from __future__ import annotations

from enum import Enum, auto

MOST_WAITING = 4
"""Pieces handed on that the next stage has not begun."""
ENDING_LAYERS = 2
"""So many layers before its end a stage asks for the next piece: who has it ends the layer that it is at first."""


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


class Reports:
    """What the receiving side tells, and when: arguments of `heard`, or None where there is nothing new to the other."""

    def __init__(self, previous_end: int, earliest_end: int) -> None:
        """The sending side has layers in front of `previous_end`; this one may be done in front of `earliest_end`."""
        self._previous_end = previous_end
        self._ending_at = earliest_end - ENDING_LAYERS
        self._begun = 0

    def begin(self, layer: int) -> tuple[int, int, bool]:
        """It begins the next piece, in front of this layer."""
        self._begun += 1
        return self._reached(layer)

    def wrote(self, layer: int) -> tuple[int, int, bool] | None:
        """The piece's K and V of this layer are written."""
        if layer < self._previous_end or layer + 1 == self._ending_at:
            return self._reached(layer + 1)
        return None

    def _reached(self, layer: int) -> tuple[int, int, bool]:
        return self._begun, layer, layer >= self._ending_at
