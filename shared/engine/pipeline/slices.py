"""How work is cut: layers into stages, and the tokens of a step into pieces."""

from __future__ import annotations

from msgspec import Struct

from shared.engine.attention.api import AttentionBatch, Span

ALIGN = 16
"""Pieces of a sequence end at multiples of it, and are no shorter, unless the sequence's share of the step is: kernels
round differently for very few rows, and a cut must not change a bit."""

HALVED_AT = 2048
"""Position at which a piece is half as long as at the beginning: the costliest one is what the last stage comes late by,
and a row costs the more attention the further back it is."""
SHORTEST = 64


SEAM_LAYERS = 2
"""Layers on each side of the border between two stages that both have, where stages are long enough."""


class Slice(Struct, frozen=True):
    """The layers first..end that a stage has. Those that a neighbour has too are computed here or there, as it comes."""

    first: int
    end: int
    previous_end: int
    """The stage before has the layers in front of this one too; 0: there is none."""
    earliest_end: int
    """It hands on in front of this layer at the earliest."""

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


class Piece(Struct, frozen=True):
    """Rows that go through the stages together."""

    rows: slice
    """In the packed step."""
    spans: tuple[Span, ...]
    """first_row counts within the piece."""

    @property
    def batch(self) -> AttentionBatch:
        return AttentionBatch(self.spans)


def layer_slices(layers: int, stages: int) -> tuple[Slice, ...]:
    """Neighbouring layers for each stage, as evenly as it goes; where it does not, the first stages take one more, since
    the last one has the head."""
    assert 1 <= stages <= layers
    each, more = divmod(layers, stages)
    seam = min(SEAM_LAYERS, (each - 1) // 2)
    slices: list[Slice] = []
    border = 0
    for stage in range(stages):
        first = border - seam if stage else 0
        border += each + (stage < more)
        overlap = seam if stage < stages - 1 else 0
        previous_end = slices[-1].end if slices else 0
        slices.append(Slice(first, border + overlap, previous_end, border - overlap))
    return tuple(slices)


def pieces(batch: AttentionBatch, piece_tokens: int, block_tokens: int) -> list[Piece]:
    """Cut a step into pieces of about equal cost, each of at most `piece_tokens` + ALIGN rows; in order, each row in one
    of them."""
    made: list[Piece] = []
    spans: list[Span] = []
    first = row = room = 0
    for span in batch.spans:
        at = span.start
        while at < span.end:
            if not spans:
                room = _length(piece_tokens, at)
            end = span.end if span.end - at <= room + ALIGN else (at + room) // ALIGN * ALIGN
            if end - at >= min(ALIGN, span.end - at):
                pages = span.pages[: -(-end // block_tokens)]
                spans.append(Span(at, end, pages, row - first))
                row += end - at
                room -= end - at
                at = end
            if at < span.end or room <= 0:
                made.append(Piece(slice(first, row), tuple(spans)))
                spans, first = [], row
    if spans:
        made.append(Piece(slice(first, row), tuple(spans)))
    return made


def _length(piece_tokens: int, position: int) -> int:
    shortest = max(2 * ALIGN, min(SHORTEST, piece_tokens))
    return max(shortest, piece_tokens * HALVED_AT // (HALVED_AT + position))
