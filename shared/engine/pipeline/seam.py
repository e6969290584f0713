"""Decides at which layer a piece is handed on to the next stage. Pure: link and threads are in onward.

Two neighbouring stages both have the layers around their border: the seam. Within the seam, a piece is handed on as soon
as the next stage is about to run out of work. So neither stage waits for the other while their speeds differ by no more
than the seam's width. A fixed border would make the group as slow as its slowest process, and on a shared machine any
process may be the slowest at times.

Below, "in front of layer i" means: computed up to layer i-1, so that the rows are the input to layer i.
"""

from __future__ import annotations

from enum import Enum, auto

MOST_WAITING = 4
"""How many pieces may be handed on that the next stage has not begun."""
ENDING_LAYERS = 2
"""A stage asks for the next piece this many layers before its end, since the sender first completes the layer that it is
computing."""


class Turn(Enum):
    COMPUTE = auto()
    HAND_ON = auto()
    WAIT = auto()
    """Ask again after the next call of `heard`."""


class Seam:
    """The state and the decisions of the sending stage. It hands a piece on in front of a layer in earliest..latest.

    To compute a layer of a piece, K and V of the pieces before it must be written in that layer. Where the next stage
    computes the layer for those pieces, this stage waits until it has written them.
    """

    def __init__(self, earliest: int, latest: int) -> None:
        self.earliest = earliest
        self.latest = latest
        self._sent = 0
        """Pieces handed on so far."""
        self._begun = 0
        """How many of them the next stage has begun or completed."""
        self._written = latest
        """The next stage has written K and V of the latest piece that it has begun, for all layers below this one."""
        self._ending = True
        """The next stage is about to be done with that piece."""
        self._border = latest
        """The layer in front of which the latest piece was handed on."""

    def begin_step(self) -> None:
        """Call this when no piece is under way: all K and V of earlier pieces are written."""
        self._border = self.latest

    def heard(self, begun: int, written: int, ending: bool) -> None:
        """Take the next stage's report: it has begun `begun` pieces in all, has written K and V of the latest of them for
        all layers below `written`, and is about to be done with it if `ending`."""
        self._begun, self._written, self._ending = begun, written, ending

    def turn(self, layer: int) -> Turn:
        """What to do with a piece that is in front of this layer, one of earliest..latest."""
        waiting = self._sent - self._begun
        if waiting == 0 and self._ending:
            return Turn.HAND_ON
        if layer == self.latest:
            return Turn.HAND_ON if waiting < MOST_WAITING else Turn.WAIT
        # While the next stage is busy the piece stays here: the earlier it is handed on, the more work is added there.
        written = layer < self._border or (waiting == 0 and layer < self._written)
        return Turn.COMPUTE if written else Turn.WAIT

    def handed_on(self, layer: int) -> None:
        self._sent += 1
        self._border = layer


class Reports:
    """The reports of the receiving stage: arguments of `Seam.heard`, or None when the sender would learn nothing new."""

    def __init__(self, previous_end: int, earliest_end: int) -> None:
        """The sending stage has the layers below `previous_end`. This stage hands on in front of `earliest_end` at the
        earliest."""
        self._previous_end = previous_end
        self._ending_at = earliest_end - ENDING_LAYERS
        self._begun = 0

    def begin(self, layer: int) -> tuple[int, int, bool]:
        """This stage begins the next piece, at this layer."""
        self._begun += 1
        return self._reached(layer)

    def wrote(self, layer: int) -> tuple[int, int, bool] | None:
        """This stage has written the piece's K and V of this layer."""
        if layer < self._previous_end or layer + 1 == self._ending_at:
            return self._reached(layer + 1)
        return None

    def _reached(self, layer: int) -> tuple[int, int, bool]:
        return self._begun, layer, layer >= self._ending_at
