"""Attention on the CPU with torch alone, for machines where the C++ kernels cannot be built. Each sequence's pages are
gathered, then torch's fused kernel runs over them.

Each sequence has kernel calls of its own, so its output is bit-identical whatever other sequences are in the step. The
query heads of a group are folded into query rows, so that each KV head is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from shared.engine.attention.api import AttentionBatch, AttentionShape, Reach, Span

_TILE_ROWS = 256
"""Query tokens per kernel call where a mask is needed. Small, so that little is computed that the mask drops."""


class CpuAttention:
    """Implements attention.api.AttentionBackend."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        self._shape = shape
        rows = (shape.block_tokens, shape.kv_heads, shape.head_dim)
        self._halves = [layer.view(-1, *rows) for layer in layers]
        """K of page p is half 2p, V is half 2p+1."""
        self._slots = torch.empty(0, dtype=torch.long)
        self._plans: list[dict[Reach, _SpanPlan]] = []

    def plan(self, batch: AttentionBatch) -> None:
        block = self._shape.block_tokens
        slots = torch.tensor(list(batch.slots(block)), dtype=torch.long)
        self._slots = slots + slots.div(block, rounding_mode="floor") * block
        dtype = self._halves[0].dtype
        self._plans = [
            {reach: _SpanPlan(span, self._shape, reach, dtype) for reach in self._shape.distinct_reaches}
            for span in batch.spans
        ]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self._halves[layer].view(-1, self._shape.kv_heads, self._shape.head_dim)
        rows.index_copy_(0, self._slots, keys)
        rows.index_copy_(0, self._slots + self._shape.block_tokens, values)

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(queries)
        halves, reach = self._halves[layer], self._shape.reach(layer)
        for plans in self._plans:
            plans[reach].run(halves, queries, output)
        return output


class _SpanPlan:
    """One sequence of a step, for layers of one reach: where its keys are, and the masks of its tiles of queries."""

    def __init__(self, span: Span, shape: AttentionShape, reach: Reach, dtype: torch.dtype) -> None:
        self._span = span
        self._shape = shape
        self._cap = reach.cap
        pages = torch.tensor(span.pages, dtype=torch.long)
        self._keys, self._values = pages * 2, pages * 2 + 1
        plain = reach == Reach() and span.start == 0
        self._tiles = [] if plain else _tiles(span, shape.group, reach.window, dtype)

    def run(self, halves: torch.Tensor, queries: torch.Tensor, output: torch.Tensor) -> None:
        keys, values = self._gather(halves, self._keys), self._gather(halves, self._values)
        own, out = queries[self._span.rows], output[self._span.rows]
        if not self._tiles:
            heads = scaled_dot_product_attention(
                own.transpose(0, 1)[None],
                keys,
                values,
                is_causal=True,
                scale=self._shape.scale,
                enable_gqa=True,
            )
            out.copy_(heads[0].transpose(0, 1))
        for first, last, mask in self._tiles:
            seen = self._span.start + last
            out[first:last] = self._folded(own[first:last], keys[:, :, :seen], values[:, :, :seen], mask)

    def _gather(self, halves: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Keys or values of all positions of the sequence: [1, kv_heads, end, head_dim]."""
        rows = halves.index_select(0, which).flatten(0, 1)[: self._span.end]
        return rows.transpose(0, 1)[None]

    def _folded(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        shape, tokens = self._shape, len(queries)
        folded = queries.reshape(tokens, shape.kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        rows = folded.reshape(1, shape.kv_heads, shape.group * tokens, shape.head_dim)
        if self._cap:
            attended = _capped(rows, keys, values, mask, shape.scale, self._cap)
        else:
            attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=shape.scale)
        unfolded = attended.reshape(shape.kv_heads, shape.group, tokens, shape.head_dim).permute(2, 0, 1, 3)
        return unfolded.reshape(tokens, shape.query_heads, shape.head_dim)


def _capped(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Attention with capped logits, for which torch has no fused kernel."""
    logits = torch.tanh(rows @ keys.transpose(-1, -2) * (scale / cap)) * cap
    if mask is not None:
        logits = logits + mask
    return torch.softmax(logits, -1, dtype=torch.float32).to(values.dtype) @ values


def _tiles(
    span: Span, group: int, window: int, dtype: torch.dtype
) -> list[tuple[int, int, torch.Tensor | None]]:
    """Tiles of the span's queries: (first, last, additive mask). A single query that sees all keys needs no mask."""
    if span.tokens == 1 and not 0 < window < span.end:
        return [(0, 1, None)]
    tiles: list[tuple[int, int, torch.Tensor | None]] = []
    for first in range(0, span.tokens, _TILE_ROWS):
        last = min(first + _TILE_ROWS, span.tokens)
        positions = torch.arange(span.start + first, span.start + last)[:, None]
        keys = torch.arange(span.start + last)[None, :]
        hidden = keys > positions
        if window:
            hidden |= keys <= positions - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        tiles.append((first, last, mask.repeat(group, 1)))
    return tiles
