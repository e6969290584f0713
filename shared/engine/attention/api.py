"""The protocol of attention backends: plan once per step, then append and run once per layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct
from msgspec.structs import replace


class Reach(Struct, frozen=True):
    """The attention window of a layer, and the cap on its attention logits."""

    window: int = 0
    """How many keys a query sees, its own included. 0: its own and all before it."""
    cap: float = 0.0
    """Logits x become cap * tanh(x / cap). 0: they are not capped."""


class AttentionShape(Struct, frozen=True):
    """Sizes and parameters of a model's attention."""

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    scale: float
    reaches: tuple[Reach, ...] = ()
    """One per layer. Empty: all layers have full attention without a cap."""

    def reach(self, layer: int) -> Reach:
        return self.reaches[layer] if self.reaches else Reach()

    @property
    def distinct_reaches(self) -> tuple[Reach, ...]:
        return tuple(dict.fromkeys(self.reaches)) or (Reach(),)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


class Span(Struct, frozen=True):
    """The tokens of one sequence in a step: positions start .. end-1. Their rows in the packed step begin at
    first_row."""

    start: int
    end: int
    pages: tuple[int, ...]
    """Exactly the pages that hold positions 0 .. end-1."""
    first_row: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.tokens)


class AttentionBatch(Struct, frozen=True):
    """One packed step. Row t of queries, keys and values belongs to the t-th token over all spans, in order."""

    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    def positions(self) -> Iterator[int]:
        """The position of each row."""
        return (position for span in self.spans for position in range(span.start, span.end))

    def slots(self, block_tokens: int) -> Iterator[int]:
        """For each row: `page * block_tokens + offset within the page` of its position."""
        return (
            span.pages[position // block_tokens] * block_tokens + position % block_tokens
            for span in self.spans
            for position in range(span.start, span.end)
        )

    def only(self, rows: Sequence[int], block_tokens: int) -> AttentionBatch:
        """The step reduced to these rows, which are ascending. KV of the positions before them must already be in the
        pages. A span that keeps only some of its rows is replaced by a one-row span for each of them."""
        spans: list[Span] = []
        at = 0
        for span in self.spans:
            until = bisect_left(rows, span.rows.stop, at)
            if until - at == span.tokens:
                spans.append(replace(span, first_row=at))
            else:
                for i in range(at, until):
                    position = span.start + rows[i] - span.first_row
                    pages = span.pages[: position // block_tokens + 1]
                    spans.append(Span(position, position + 1, pages, i))
            at = until
        return AttentionBatch(tuple(spans))


class AttentionBackend(Protocol):
    """Causal attention of packed sequences over KV pages: one tensor `[pages, 2, block_tokens, kv_heads, head_dim]` per
    layer, which the backend writes and reads in place. One step at a time; not thread-safe.

    A row's output depends only on its own sequence, up to rounding. Page rows at positions from a span's end on are never
    read.
    """

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one step. All work that does not depend on the layer is done here."""
        ...

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values, [tokens, kv_heads, head_dim] each, into the layer's pages."""
        ...

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention of queries [tokens, query_heads, head_dim] over the layer's pages, including the appended rows. The
        output has the shape of the queries."""
        ...


@runtime_checkable
class FixableBackend(AttentionBackend, Protocol):
    """An attention backend that can keep the plans of decode steps in fixed memory, so that steps can be captured."""

    def fixed(self, rows: int, pages_per_sequence: int) -> AttentionBackend:
        """A backend over the same pages, for steps of exactly `rows` sequences that compute one token each and have at
        most `pages_per_sequence` pages each.

        Everything that differs between its plans is kept at fixed addresses. So device work that was captured from
        `append` and `run` after one plan computes a new step when it is repeated after `plan` was called for that
        step."""
        ...
