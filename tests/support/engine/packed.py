"""Makes packed steps for tests of attention."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.kv.block_keys import blocks_for
from shared.engine.attention.api import AttentionBatch, Span


def packed(block_tokens: int, *parts: tuple[int, int, Sequence[int]]) -> AttentionBatch:
    """A step of positions start .. end-1 of each sequence; each part is (start, end, pages). Pages that are not needed
    are dropped."""
    spans, row = [], 0
    for start, end, pages in parts:
        spans.append(Span(start, end, tuple(pages[: blocks_for(end, block_tokens)]), row))
        row += end - start
    return AttentionBatch(tuple(spans))


def packed_apart(block_tokens: int, *parts: tuple[int, int]) -> AttentionBatch:
    """A step of sequences (start, end). The i-th sequence has the pages from 1000 * i on."""
    return packed(block_tokens, *((*part, range(1000 * i, 1000 * (i + 1))) for i, part in enumerate(parts)))
