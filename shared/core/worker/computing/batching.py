"""What the next engine step computes. There are no phases: a sequence has computed and wanted tokens, a step closes gaps.

A sequence whose prompt is computed wants one token more than it has (the one just sampled); one whose prompt is not
wants the rest of it, in chunks. Chunks end on a block boundary, except the prompt's last, so that every block is
streamed out once, complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Protocol, TypeVar


class Row(Protocol):
    """A sequence as batching sees it."""

    prompt_tokens: int
    computed: int
    """Tokens whose KV is in its pages."""
    wanted: int
    """Tokens known so far."""


R = TypeVar("R", bound=Row)


def plan_step(
    rows: Iterable[R], *, chunk_tokens: int, block_tokens: int, max_rows: int
) -> list[tuple[R, int]]:
    """(sequence, how many tokens to compute) for the next step, from rows in the order they came.

    Guarantees: at most `max_rows` sequences, the first ones; every decoding one of them takes part; prompt chunks
    together fit what decoding left of `chunk_tokens`, but the first waiting prompt always gets at least a block, so that
    nobody starves.
    """
    first = list(islice(rows, max_rows))
    decoding = [(row, row.wanted - row.computed) for row in first if row.computed >= row.prompt_tokens]
    if len(decoding) == len(first):
        return decoding
    budget = max(chunk_tokens - len(decoding), block_tokens)
    for row in first:
        if row.computed >= row.prompt_tokens:
            continue
        tokens = chunk(row.computed, row.wanted, budget, block_tokens)
        if tokens == 0:
            break
        decoding.append((row, tokens))
        budget -= tokens
    return decoding


def chunk(computed: int, wanted: int, budget: int, block_tokens: int) -> int:
    """How much of a gap fits the budget: all of it, or up to the last block boundary within."""
    if wanted - computed <= budget:
        return wanted - computed
    return max(0, (computed + max(0, budget)) // block_tokens * block_tokens - computed)
