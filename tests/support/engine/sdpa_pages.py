"""Torch's own attention over KV pages, on any device. The pages are gathered, then one call computes the whole batch.

Only for sequences of equal length. FlashInfer's times are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from shared.engine.attention.api import AttentionBatch, AttentionShape


class SdpaPages:
    """Implements attention.api.AttentionBackend, without windows and caps, for steps whose sequences all have the same
    length and compute the same number of tokens: one, or all."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        self._shape = shape
        self._layers = layers
        self._device = layers[0].device

    def plan(self, batch: AttentionBatch) -> None:
        (self._end,) = {span.end for span in batch.spans}
        (self._tokens,) = {span.tokens for span in batch.spans}
        assert self._tokens in (1, self._end)
        self._pages = torch.tensor([list(span.pages) for span in batch.spans], device=self._device)
        self._slots = torch.tensor(list(batch.slots(self._shape.block_tokens)), device=self._device)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        block = self._shape.block_tokens
        page, row = self._slots.div(block, rounding_mode="floor"), self._slots % block
        self._layers[layer][page, 0, row] = keys
        self._layers[layer][page, 1, row] = values

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        shape, (sequences, _) = self._shape, self._pages.shape
        gathered = self._layers[layer].index_select(0, self._pages.flatten())
        rows = (
            gathered.unflatten(0, (sequences, -1))
            .permute(2, 0, 4, 1, 3, 5)
            .flatten(3, 4)[..., : self._end, :]
        )
        heads = queries.view(sequences, self._tokens, shape.query_heads, shape.head_dim).transpose(1, 2)
        attended = scaled_dot_product_attention(
            heads, rows[0], rows[1], is_causal=self._tokens > 1, scale=shape.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(queries.shape)
