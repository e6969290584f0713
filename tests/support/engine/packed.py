"""Packed steps, as attention takes them, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.kv.block_keys import blocks_for
from shared.engine.attention.api import AttentionBatch, Span


def packed(block_tokens: int, *parts: tuple[int, int, Sequence[int]]) -> AttentionBatch:
    """Sequences of (start, end, pages): positions start .. end-1 of each. There may be more pages than they need."""
    spans, row = [], 0
    for start, end, pages in parts:
        spans.append(Span(start, end, tuple(pages[: blocks_for(end, block_tokens)]), row))
        row += end - start
    return AttentionBatch(tuple(spans))


def packed_apart(block_tokens: int, *parts: tuple[int, int]) -> AttentionBatch:
    """Sequences of (start, end), the i-th one in pages 1000 * i and on."""
    return packed(block_tokens, *((*part, range(1000 * i, 1000 * (i + 1))) for i, part in enumerate(parts)))
