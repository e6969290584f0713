"""Decode attention in plain torch with the plan in fixed memory, as CUDA graphs require. Runs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.attention.api import AttentionBackend, AttentionBatch, AttentionShape
from shared.engine.attention.cpu import CpuAttention
from shared.engine.attention.reference import ReferenceAttention


class FixableReference(ReferenceAttention):
    """Implements attention.api.FixableBackend."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        super().__init__(shape, layers)
        self._all = layers
        self.made: list[int] = []
        """The number of rows of each fixed backend made so far."""

    def fixed(self, rows: int, pages_per_sequence: int) -> AttentionBackend:
        self.made.append(rows)
        return FixedTorch(self._shape, self._all, rows, pages_per_sequence)


class FixableCpu(CpuAttention):
    """Implements attention.api.FixableBackend, faster than FixableReference."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        super().__init__(shape, layers)
        self._all = layers

    def fixed(self, rows: int, pages_per_sequence: int) -> AttentionBackend:
        return FixedTorch(self._shape, self._all, rows, pages_per_sequence)


class FixedTorch:
    """Implements attention.api.AttentionBackend for `rows` sequences of one token each."""

    def __init__(
        self, shape: AttentionShape, layers: Sequence[torch.Tensor], rows: int, pages_per_sequence: int
    ) -> None:
        self._shape = shape
        self._layers = layers
        self._rows = rows
        self._pages = torch.zeros(rows, pages_per_sequence, dtype=torch.long)
        self._ends = torch.zeros(rows, dtype=torch.long)
        self._slots = torch.zeros(rows, dtype=torch.long)
        self._seen = torch.arange(pages_per_sequence * shape.block_tokens)

    def plan(self, batch: AttentionBatch) -> None:
        assert len(batch.spans) == batch.tokens == self._rows
        self._slots.copy_(torch.tensor(list(batch.slots(self._shape.block_tokens))))
        for row, span in enumerate(batch.spans):
            self._pages[row, : len(span.pages)] = torch.tensor(span.pages)
            self._ends[row] = span.end

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        block = self._shape.block_tokens
        page, at = self._slots.div(block, rounding_mode="floor"), self._slots % block
        half = torch.zeros_like(page)
        self._layers[layer].index_put_((page, half, at), keys)
        self._layers[layer].index_put_((page, half + 1, at), values)

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        shape, reach = self._shape, self._shape.reach(layer)
        keys, values = (self._gathered(layer, half) for half in (0, 1))
        folded = queries.view(self._rows, shape.kv_heads, shape.group, shape.head_dim).double()
        scores = torch.einsum("rkgd,rtkd->rkgt", folded, keys) * shape.scale
        if reach.cap:
            scores = torch.tanh(scores / reach.cap) * reach.cap
        ends = self._ends[:, None]
        hidden = self._seen[None] >= ends
        if reach.window:
            hidden = hidden | (self._seen[None] < ends - reach.window)
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        # values beyond a sequence's end may be anything, even NaN
        values = values.masked_fill(hidden[:, :, None, None], 0.0)
        return torch.einsum("rkgt,rtkd->rkgd", weights, values).reshape(queries.shape).to(queries.dtype)

    def _gathered(self, layer: int, half: int) -> torch.Tensor:
        """Keys (half 0) or values (half 1): float64 [rows, tokens, kv_heads, head_dim]."""
        pages = self._layers[layer][self._pages.flatten(), half]
        return pages.view(self._rows, -1, self._shape.kv_heads, self._shape.head_dim).double()
