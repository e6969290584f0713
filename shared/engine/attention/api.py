"""What a model's layers ask of an attention backend: plan once per step, then append and run once per layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from msgspec import Struct
from msgspec.structs import replace


class Reach(Struct, frozen=True):
    """How far a layer's queries see, and how high their logits go."""

    window: int = 0
    """Keys that a query sees, its own among them; 0: all before it."""
    cap: float = 0.0
    """Logits x become cap * tanh(x / cap); 0: they stay."""


class AttentionShape(Struct, frozen=True):
    """What a model's layers ask of attention."""

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    scale: float
    reaches: tuple[Reach, ...] = ()
    """Of each layer; none: all layers are plain."""

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
    """The tokens of one sequence in a step: positions start .. end-1, whose rows are first_row .. in the packed
    step."""

    start: int
    end: int
    pages: tuple[int, ...]
    """Pages of positions 0 .. end-1, no more."""
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
        """For each row `page * block_tokens + row in the page` of its position."""
        return (
            span.pages[position // block_tokens] * block_tokens + position % block_tokens
            for span in self.spans
            for position in range(span.start, span.end)
        )

    def only(self, rows: Sequence[int], block_tokens: int) -> AttentionBatch:
        """The step with these rows alone, ascending; the positions before them are in the pages already. A span that
        keeps some of its rows becomes one of a single row for each."""
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
    """Causal attention of packed sequences over KV pages `[pages, 2, block_tokens, kv_heads, head_dim]`, one tensor a
    layer, which the backend writes and reads in place. One step at a time; not thread-safe.

    The output of a row depends on its own sequence alone, up to rounding. Rows of pages at and behind a span's end are
    never read.
    """

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare one step. Everything that does not depend on the layer is done here."""
        ...

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values, [tokens, kv_heads, head_dim] each, into the layer's pages."""
        ...

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention of queries [tokens, query_heads, head_dim] over the layer's pages, the appended rows included."""
        ...


@runtime_checkable
class FixableBackend(AttentionBackend, Protocol):
    """One that can also keep the plans of decode steps in fixed memory, for steps that are captured and repeated."""

    def fixed(self, rows: int, pages_per_sequence: int) -> AttentionBackend:
        """A backend over the same pages, for steps of exactly `rows` sequences that compute one token each and have at
        most so many pages each. Whatever differs between two of its plans lies in memory that stays where it is: work
        on the device that append and run gave it after one plan computes another step when it is repeated after
        another plan."""
        ...
