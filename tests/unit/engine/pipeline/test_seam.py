"""The border between two stages moves so that neither waits, and no layer is computed before what it needs is written."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count, cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.pipeline.seam import MOST_WAITING, Reports, Seam, Turn

LAYERS = 12
BORDER = 6


class Two:
    """Two stages on virtual time: each takes what its clock says for a layer of a piece."""

    def __init__(self, width: int, pieces: int, first: Iterator[int], second: Iterator[int]) -> None:
        self.seam = Seam(BORDER - width, BORDER + width)
        self.reports = Reports(BORDER + width, LAYERS)
        self.clocks = first, second
        self.pieces = pieces
        self.borders: list[int] = []
        self.waiting: list[int] = []
        """Pieces in front of the second stage."""
        self.begun = 0
        self.written: set[tuple[int, int]] = set()
        self.ended_at = 0
        self.busy = [0, 0]
        self._idle = True
        self._stopped: tuple[int, int] | None = None
        """The first stage's piece and layer, while it waits."""
        self._now = 0
        self._order = count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []

    def run(self) -> None:
        self.seam.begin_step()
        self._first(0, 0)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
            assert len(self.waiting) <= MOST_WAITING
        assert self.written == {(p, layer) for p in range(self.pieces) for layer in range(LAYERS)}

    def _compute(self, stage: int, piece: int, layer: int, then: Callable[[], None]) -> None:
        assert piece == 0 or (piece - 1, layer) in self.written
        assert (piece, layer) not in self.written
        time = next(self.clocks[stage])
        self.busy[stage] += time

        def end() -> None:
            self.written.add((piece, layer))
            then()

        heapq.heappush(self._events, (self._now + time, next(self._order), end))

    def _first(self, piece: int, layer: int) -> None:
        self._stopped = None
        if piece == self.pieces:
            return
        turn = Turn.COMPUTE if layer < self.seam.earliest else self.seam.turn(layer)
        if turn is Turn.COMPUTE:
            self._compute(0, piece, layer, lambda: self._first(piece, layer + 1))
        elif turn is Turn.WAIT:
            self._stopped = piece, layer
        else:
            self.seam.handed_on(layer)
            self.borders.append(layer)
            self.waiting.append(layer)
            if self._idle:
                self._begin()
            self._first(piece + 1, 0)

    def _begin(self) -> None:
        self._idle = not self.waiting
        if self.waiting:
            self.begun += 1
            layer = self.waiting.pop(0)
            self._tell(self.reports.begin(layer))
            self._second(self.begun - 1, layer)

    def _second(self, piece: int, layer: int) -> None:
        if layer == LAYERS:
            self.ended_at = self._now
            return self._begin()

        def then() -> None:
            if reached := self.reports.wrote(layer):
                self._tell(reached)
            self._second(piece, layer + 1)

        return self._compute(1, piece, layer, then)

    def _tell(self, reached: tuple[int, int, bool]) -> None:
        self.seam.heard(*reached)
        if self._stopped:
            self._first(*self._stopped)


times = st.lists(st.integers(1, 1000), min_size=1, max_size=40).map(cycle)


@given(st.integers(0, 3), st.integers(1, 30), times, times)
def test_every_layer_of_every_piece_is_computed_once_after_what_it_needs(
    width: int, pieces: int, first: Iterator[int], second: Iterator[int]
) -> None:
    Two(width, pieces, first, second).run()


@pytest.mark.parametrize(("first", "second"), [(100, 100), (100, 140), (140, 100), (100, 200), (200, 100)])
def test_a_slower_stage_computes_fewer_layers(first: int, second: int) -> None:
    two = Two(2, 60, cycle([first]), cycle([second]))
    two.run()
    both = 1 / (1 / first + 1 / second)  # of a layer, while both compute
    ideal = 60 * LAYERS * both
    assert two.ended_at < 1.05 * ideal
    fixed = Two(0, 60, cycle([first]), cycle([second]))
    fixed.run()
    assert two.ended_at <= fixed.ended_at
    if first != second:
        assert two.ended_at < 0.92 * fixed.ended_at


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("stall", [50, 2000, 10_000])
def test_after_a_stall_both_are_busy_again(slow: int, stall: int) -> None:
    """A border that a stall has pushed to one side must not stay there."""
    for at in range(150, 210, 7):
        clocks = [cycle([100]), cycle([100])]
        clocks[slow] = iter([100] * at + [stall] + [100] * 5000)
        two = Two(2, 100, *clocks)
        two.run()
        assert two.ended_at < 1.05 * (100 * LAYERS * 100 / 2 + stall)


def test_a_second_stage_that_is_late_holds_the_first_one_up() -> None:
    two = Two(1, 50, cycle([1]), cycle([1000]))
    two.run()
    assert set(two.borders[MOST_WAITING:-1]) == {BORDER + 1}


def test_without_layers_in_common_pieces_wait_at_the_border() -> None:
    seam = Seam(5, 5)
    seam.begin_step()
    for _ in range(MOST_WAITING):
        assert seam.turn(5) is Turn.HAND_ON
        seam.handed_on(5)
    assert seam.turn(5) is Turn.WAIT
    seam.heard(1, 5, ending=False)
    assert seam.turn(5) is Turn.HAND_ON


def test_a_layer_waits_for_the_piece_before_it() -> None:
    seam = Seam(4, 8)
    seam.begin_step()
    assert seam.turn(4) is Turn.HAND_ON  # the next stage has nothing to do
    seam.handed_on(4)
    assert seam.turn(4) is Turn.WAIT
    seam.heard(1, 5, ending=False)
    assert seam.turn(4) is Turn.COMPUTE
    assert seam.turn(5) is Turn.WAIT
    seam.heard(1, 9, ending=True)
    assert seam.turn(5) is Turn.HAND_ON


def test_a_step_waits_for_nothing_of_the_one_before() -> None:
    seam = Seam(4, 8)
    seam.begin_step()
    seam.handed_on(4)
    seam.heard(1, 9, ending=False)
    seam.handed_on(4)
    assert seam.turn(5) is Turn.WAIT
    seam.begin_step()
    assert seam.turn(5) is Turn.COMPUTE


def test_the_next_stage_tells_of_what_both_have_and_of_its_end() -> None:
    reports = Reports(previous_end=6, earliest_end=12)
    assert reports.begin(4) == (1, 4, False)
    assert [reports.wrote(layer) for layer in range(4, 12)] == [
        (1, 5, False), (1, 6, False), None, None, None, (1, 10, True), None, None,
    ]  # fmt: skip
    assert reports.begin(5) == (2, 5, False)
    assert Reports(previous_end=2, earliest_end=3).begin(2) == (1, 2, True)
