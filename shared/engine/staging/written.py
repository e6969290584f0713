"""Which parts of the pages a step wrote: whole pages for prompts, single rows for decode steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from shared.engine.attention.api import AttentionBatch

_SPARSE = 4
"""A step that writes at most one in _SPARSE rows of its pages is copied row by row, others page by page."""


class Written(Struct, frozen=True):
    """Units of `rows` rows each. A page of b tokens has 2 * b rows, keys before values. Unit i begins at row i * rows,
    counted over the rows of all pages."""

    rows: int
    units: tuple[int, ...]


def whole_pages(pages: Iterable[int], block_tokens: int) -> Written:
    return Written(2 * block_tokens, tuple(pages))


def written(batch: AttentionBatch, block_tokens: int) -> Written:
    """What a step writes, as single rows if it is sparse, else as whole pages. It may include rows beyond a sequence's
    end."""
    pages = [page for span in batch.spans for page in span.pages[span.start // block_tokens :]]
    if batch.tokens * _SPARSE > len(pages) * block_tokens:
        return whole_pages(pages, block_tokens)
    return Written(1, tuple(_rows(batch, block_tokens)))


def _rows(batch: AttentionBatch, block_tokens: int) -> Iterator[int]:
    for slot in batch.slots(block_tokens):
        page, row = divmod(slot, block_tokens)
        key = 2 * page * block_tokens + row
        yield from (key, key + block_tokens)
