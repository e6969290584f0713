"""For how many rows a decode step is captured, and which capture a step takes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.attention.api import AttentionBatch, Span


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Ascending, `largest` the last: few, since each costs start-up time and memory, and near enough to each other that
    from 8 rows on at most a third of a step is padding: powers of two, from 8 on also the middles between them."""
    sizes = set()
    power = 1
    while power < largest:
        sizes.add(power)
        if power >= 8 and power * 3 // 2 < largest:
            sizes.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(sizes | {largest})) if largest > 0 else ()


def fitting(batch: AttentionBatch, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds the step; None if it computes more than one token of a sequence, or
    has too many sequences."""
    rows = len(batch.spans)
    if batch.tokens != rows:
        return None
    return next((size for size in sizes if size >= rows), None)


def padded(batch: AttentionBatch, rows: int, scrap: int) -> AttentionBatch:
    """The decode step with sequences of one token behind its own, up to `rows`. They live in the scrap page, all in the
    same place: whatever they write there, no other row reads it, and they write nowhere else."""
    own = len(batch.spans)
    padding = (Span(0, 1, (scrap,), row) for row in range(own, rows))
    return AttentionBatch((*batch.spans, *padding))
