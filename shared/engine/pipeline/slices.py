"""How work is cut: layers into stages, and the tokens of a step into pieces."""

from __future__ import annotations

from msgspec import Struct

from shared.engine.attention.api import AttentionBatch, Span

ALIGN = 16
"""Pieces of a sequence end at multiples of ALIGN positions and have at least ALIGN rows of it, unless the sequence's
share of the step ends there or is shorter. Kernels round differently for very few rows, and a cut must not change a bit
of the result."""

HALVED_AT = 2048
"""The position at which pieces are half as long as at position 0. Attention makes a row cost more the further back it
is, and the last stage finishes late by the cost of the costliest piece, so pieces should cost about the same."""
SHORTEST = 64


SEAM_LAYERS = 2
"""Layers on each side of the border between two stages that both stages have, if the stages are long enough."""


class Slice(Struct, frozen=True):
    """The layers first .. end-1 that a stage has. A layer that a neighbour has too is computed by either of them, as
    decided for each piece."""

    first: int
    end: int
    previous_end: int
    """The stage before this one has the layers below this number; 0: there is no stage before."""
    earliest_end: int
    """This stage hands a piece on in front of this layer at the earliest."""

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


class Piece(Struct, frozen=True):
    """Rows of a step that go through the stages together."""

    rows: slice
    """Where they are in the packed step."""
    spans: tuple[Span, ...]
    """Their spans; first_row is an index within the piece."""

    @property
    def batch(self) -> AttentionBatch:
        return AttentionBatch(self.spans)


def layer_slices(layers: int, stages: int) -> tuple[Slice, ...]:
    """Distribute consecutive layers over the stages as evenly as possible. If they do not divide evenly, the first stages
    get one layer more, since the last stage also computes the head."""
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
    """Cut a step into pieces of about equal cost, of at most `piece_tokens` + ALIGN rows each. The pieces are in order
    and hold each row exactly once."""
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
