"""The row counts for which decode steps are captured, and which capture a step uses. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.attention.api import AttentionBatch, Span


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Ascending sizes up to and including `largest`: powers of two and, from 8 on, also the middles between them.

    There are few, since each costs start-up time and memory. From 8 rows on they are so close that at most a third of a
    step is padding."""
    sizes = set()
    power = 1
    while power < largest:
        sizes.add(power)
        if power >= 8 and power * 3 // 2 < largest:
            sizes.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(sizes | {largest})) if largest > 0 else ()


def fitting(batch: AttentionBatch, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds the step. None if the step computes more than one token of some
    sequence, or has too many sequences."""
    rows = len(batch.spans)
    if batch.tokens != rows:
        return None
    return next((size for size in sizes if size >= rows), None)


def padded(batch: AttentionBatch, rows: int, scrap: int) -> AttentionBatch:
    """The decode step, padded to `rows` sequences by sequences of one token each. All padding sequences write to position
    0 of page `scrap` and nowhere else. No other row reads it."""
    own = len(batch.spans)
    padding = (Span(0, 1, (scrap,), row) for row in range(own, rows))
    return AttentionBatch((*batch.spans, *padding))
