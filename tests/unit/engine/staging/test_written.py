"""What of the pages a step wrote: never less than that, and little more."""

from __future__ import annotations

from itertools import count

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from hypothesis import given
from hypothesis import strategies as st

from shared.core.kv.block_keys import blocks_for
from shared.engine.attention.api import AttentionBatch
from shared.engine.staging.written import Written, written
from tests.support.engine.packed import packed

BLOCK = 8


def batch(*parts: tuple[int, int]) -> AttentionBatch:
    """Spans of positions start .. end-1, each in pages of its own."""
    free = count()
    return packed(
        BLOCK, *((start, end, [next(free) for _ in range(blocks_for(end, BLOCK))]) for start, end in parts)
    )


def test_a_decode_step_is_copied_row_by_row() -> None:
    assert written(batch((9, 10), (7, 8)), BLOCK) == Written(1, (17, 25, 39, 47))


def test_a_prompt_is_copied_page_by_page() -> None:
    assert written(batch((0, 20)), BLOCK) == Written(16, (0, 1, 2))
    assert written(batch((12, 20)), BLOCK) == Written(16, (1, 2))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=5))
def test_every_row_of_every_token_is_among_it(parts: list[tuple[int, int]]) -> None:
    step = batch(*((start, start + tokens) for start, tokens in parts))
    what = written(step, BLOCK)
    rows = {unit * what.rows + i for unit in what.units for i in range(what.rows)}
    needed = {
        2 * BLOCK * (slot // BLOCK) + half * BLOCK + slot % BLOCK
        for slot in step.slots(BLOCK)
        for half in (0, 1)
    }
    assert needed <= rows
    assert len(rows) == len(what.units) * what.rows
    own = {page for span in step.spans for page in span.pages[span.start // BLOCK :]}
    assert {row // (2 * BLOCK) for row in rows} <= own
