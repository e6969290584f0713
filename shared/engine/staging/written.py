"""Which parts of the pages a step wrote: whole pages for prompts, single rows for the one token of a decode step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from shared.engine.attention.api import AttentionBatch

_SPARSE = 4
"""A step that writes less than one row in so many of its pages is copied row by row."""


class Written(Struct, frozen=True):
    """Units of `rows` rows each; a page of b tokens has 2 * b rows, its keys before its values, and unit i begins at row
    i * rows of all pages' rows."""

    rows: int
    units: tuple[int, ...]


def whole_pages(pages: Iterable[int], block_tokens: int) -> Written:
    return Written(2 * block_tokens, tuple(pages))


def written(batch: AttentionBatch, block_tokens: int) -> Written:
    """What a step writes, in as few bytes as is worth it. Rows beyond a sequence's end may be among it."""
    pages = [page for span in batch.spans for page in span.pages[span.start // block_tokens :]]
    if batch.tokens * _SPARSE > len(pages) * block_tokens:
        return whole_pages(pages, block_tokens)
    return Written(1, tuple(_rows(batch, block_tokens)))


def _rows(batch: AttentionBatch, block_tokens: int) -> Iterator[int]:
    for slot in batch.slots(block_tokens):
        page, row = divmod(slot, block_tokens)
        key = 2 * page * block_tokens + row
        yield from (key, key + block_tokens)
