"""Parts of a packed step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.attention.api import AttentionBatch, Span
from tests.support.engine.packed import packed_apart

BLOCK = 16


def batch(*shares: tuple[int, int]) -> AttentionBatch:
    """Sequences of (start, tokens)."""
    return packed_apart(BLOCK, *((start, start + tokens) for start, tokens in shares))


def test_a_span_that_is_kept_whole_stays_one() -> None:
    whole = batch((5, 1), (0, 3), (32, 2))
    assert whole.only(range(6), BLOCK) == whole
    assert whole.only([1, 2, 3], BLOCK).spans == (Span(0, 3, (1000,), 0),)


def test_rows_of_a_span_become_spans_of_one() -> None:
    kept = batch((10, 40), (0, 4)).only([3, 39, 43], BLOCK)
    assert kept.spans == (
        Span(13, 14, (0,), 0),
        Span(49, 50, (0, 1, 2, 3), 1),
        Span(3, 4, (1000,), 2),
    )


def test_nothing_is_left_of_nothing() -> None:
    assert batch((0, 3)).only([], BLOCK).spans == ()


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 40)), min_size=1, max_size=6).flatmap(
        lambda shares: st.tuples(st.just(shares), st.sets(st.integers(0, sum(t for _, t in shares) - 1)))
    )
)
def test_the_rows_that_are_left_are_where_they_were(drawn: tuple[list[tuple[int, int]], set[int]]) -> None:
    shares, rows = drawn
    whole, keep = batch(*shares), sorted(rows)
    part = whole.only(keep, BLOCK)
    assert list(part.positions()) == [list(whole.positions())[row] for row in keep]
    assert list(part.slots(BLOCK)) == [list(whole.slots(BLOCK))[row] for row in keep]
    assert [row for span in part.spans for row in range(span.rows.start, span.rows.stop)] == list(
        range(len(keep))
    )
    assert all(len(span.pages) == -(-span.end // BLOCK) for span in part.spans)
