"""Which decode steps are captured, which capture a step takes, and what pads it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.attention.api import AttentionBatch, Span
from shared.engine.graphs.sizes import capture_sizes, fitting, padded


def decodes(rows: int) -> AttentionBatch:
    return AttentionBatch(tuple(Span(5, 6, (2 * i, 2 * i + 1), i) for i in range(rows)))


def test_sizes() -> None:
    assert capture_sizes(0) == ()
    assert capture_sizes(1) == (1,)
    assert capture_sizes(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert capture_sizes(20) == (1, 2, 4, 8, 12, 16, 20)
    assert len(capture_sizes(256)) == 14


@given(st.integers(1, 1024), st.data())
def test_a_step_takes_the_smallest_capture_that_holds_it(largest: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, largest))
    sizes = capture_sizes(largest)
    size = fitting(decodes(rows), sizes)
    assert size is not None
    assert rows <= size <= largest
    assert not any(rows <= other < size for other in sizes)
    assert rows < 8 or size - rows <= size / 3


def test_what_is_not_captured() -> None:
    assert fitting(decodes(5), (1, 2, 4)) is None
    assert fitting(decodes(1), ()) is None
    chunk = Span(0, 2, (50,), 2)
    assert fitting(AttentionBatch((*decodes(2).spans, chunk)), (1, 2, 4, 8)) is None
    assert fitting(AttentionBatch((Span(0, 1, (50,), 0),)), (2,)) == 2


def test_padding_lives_in_the_scrap_page() -> None:
    batch = padded(decodes(3), 8, 99)
    assert batch.spans[:3] == decodes(3).spans
    assert batch.tokens == len(batch.spans) == 8
    assert {(s.start, s.end, s.pages) for s in batch.spans[3:]} == {(0, 1, (99,))}
    assert [s.first_row for s in batch.spans] == list(range(8))
    assert list(batch.slots(16))[3:] == [99 * 16] * 5


def test_a_step_that_fills_its_capture_has_no_padding() -> None:
    assert padded(decodes(4), 4, 99) == decodes(4)
