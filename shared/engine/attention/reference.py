"""Attention in its plainest form: a loop over sequences and heads, softmax in float64.

Slow on purpose: it is the reference that other backends are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape, Span


class ReferenceAttention:
    """Implements attention.api.AttentionBackend on any device."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        self._shape = shape
        self._layers = layers
        self._batch = AttentionBatch(())

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        pages = self._layers[layer]
        for row, slot in enumerate(self._batch.slots(self._shape.block_tokens)):
            page, at = divmod(slot, self._shape.block_tokens)
            pages[page, 0, at] = keys[row]
            pages[page, 1, at] = values[row]

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(queries)
        for span in self._batch.spans:
            keys, values = self._history(layer, span, 0), self._history(layer, span, 1)
            reach = self._shape.reach(layer)
            seen, own = torch.arange(span.end)[None, :], torch.arange(span.start, span.end)[:, None]
            hidden = seen > own
            if reach.window:
                hidden |= seen <= own - reach.window
            for head in range(self._shape.query_heads):
                of = head // self._shape.group
                scores = queries[span.rows, head].double() @ keys[:, of].T * self._shape.scale
                if reach.cap:
                    scores = torch.tanh(scores / reach.cap) * reach.cap
                scores[hidden.to(scores.device)] = -torch.inf
                output[span.rows, head] = (torch.softmax(scores, 1) @ values[:, of]).to(output.dtype)
        return output

    def _history(self, layer: int, span: Span, half: int) -> torch.Tensor:
        """Keys (half 0) or values (half 1) of positions 0 .. end-1, [end, kv_heads, head_dim]."""
        block = self._shape.block_tokens
        rows = [self._layers[layer][span.pages[p // block], half, p % block] for p in range(span.end)]
        return torch.stack(rows).double()
