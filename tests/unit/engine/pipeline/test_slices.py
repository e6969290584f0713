"""Layers into stages, tokens into pieces: nothing is lost, and no cut makes a share of very few rows."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.attention.api import AttentionBatch
from shared.engine.pipeline.slices import ALIGN, SEAM_LAYERS, layer_slices, pieces
from tests.support.engine.packed import packed_apart

BLOCK = 16


def batch(*shares: tuple[int, int]) -> AttentionBatch:
    """Sequences of (start, tokens)."""
    return packed_apart(BLOCK, *((start, start + tokens) for start, tokens in shares))


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(30, 1, [30]), (30, 2, [15, 15]), (30, 4, [8, 8, 7, 7]), (3, 2, [2, 1]), (3, 3, [1, 1, 1])],
)
def test_layers_are_shared_out_evenly_and_the_last_stage_never_has_more(
    layers: int, stages: int, sizes: list[int]
) -> None:
    slices = layer_slices(layers, stages)
    ends = list(accumulate(sizes))
    seam = min(SEAM_LAYERS, (min(sizes) - 1) // 2)
    for its, border in zip(slices[:-1], ends, strict=False):
        assert (its.earliest_end, its.end) == (border - seam, border + seam)
    assert slices[-1].earliest_end == slices[-1].end == layers
    assert [s.first for s in slices] == [0, *(s.earliest_end for s in slices[:-1])]
    assert [s.previous_end for s in slices] == [0, *(s.end for s in slices[:-1])]


@given(st.integers(1, 100), st.integers(1, 100))
def test_every_stage_has_a_layer_that_no_other_one_has(layers: int, stages: int) -> None:
    slices = layer_slices(max(layers, stages), min(layers, stages))
    shared = Counter(chain(*(s.layers for s in slices)))
    assert set(shared) == set(range(max(layers, stages)))
    for its in slices:
        assert any(shared[layer] == 1 for layer in its.layers)


def test_a_long_prompt_flows_in_pieces_that_shrink_as_attention_grows() -> None:
    ends = [p.rows.stop for p in pieces(batch((0, 1000)), 256, BLOCK)]
    assert ends == [256, 480, 672, 864, 1000]
    sizes = [p.batch.tokens for p in pieces(batch((0, 8000)), 256, BLOCK)]
    assert sizes[0] == 256
    assert sizes[-2] == 64


def test_a_remainder_of_a_few_rows_goes_with_the_piece_before() -> None:
    assert [p.rows for p in pieces(batch((0, 259)), 256, BLOCK)] == [slice(0, 259)]


def test_behind_a_cached_prefix_pieces_end_at_aligned_positions() -> None:
    ends = [p.spans[-1].end for p in pieces(batch((21, 700)), 256, BLOCK)]
    assert ends == [272, 496, 688, 721]


def test_short_sequences_share_a_piece() -> None:
    (piece,) = pieces(batch(*[(i, 1) for i in range(32)]), 256, BLOCK)
    assert [s.first_row for s in piece.spans] == list(range(32))


shares = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 900)), min_size=1, max_size=8)


@given(shares, st.integers(1, 600), st.sampled_from([16, 64, 256]))
def test_every_row_is_in_one_piece_in_order(
    of: list[tuple[int, int]], piece_tokens: int, block_tokens: int
) -> None:
    whole = batch(*of)
    cut = pieces(whole, piece_tokens, block_tokens)
    assert [p.rows.start for p in cut] == [0, *(p.rows.stop for p in cut[:-1])]
    assert cut[-1].rows.stop == whole.tokens
    flat = [
        (s.pages[0] // 1000, position) for p in cut for s in p.spans for position in range(s.start, s.end)
    ]
    assert flat == [(i, position) for i, s in enumerate(whole.spans) for position in range(s.start, s.end)]
    for piece in cut:
        assert 0 < piece.batch.tokens == piece.rows.stop - piece.rows.start
        assert piece.batch.tokens <= max(piece_tokens, 2 * ALIGN) + ALIGN
        row = 0
        for s in piece.spans:
            assert s.first_row == row
            assert len(s.pages) == -(-s.end // block_tokens)
            row += s.tokens
            share = of[s.pages[0] // 1000][1]
            assert s.tokens >= min(ALIGN, share)
