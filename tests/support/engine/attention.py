"""Runs sequences with known queries, keys and values through an attention backend, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct

from shared.core.kv.block_keys import blocks_for
from shared.engine.attention.api import AttentionBackend, AttentionShape
from tests.support.engine.packed import packed

LAYERS = 2


class KnownSequence(Struct, frozen=True):
    """A sequence's pages, and its queries, keys and values: [layers, tokens, heads, head_dim] each."""

    pages: tuple[int, ...]
    queries: Any
    keys: Any
    values: Any

    def expected(self, shape: AttentionShape, layer: int, start: int, end: int) -> Any:
        """The attention output of positions start .. end-1, by plain causal softmax in float64."""
        q = self.queries[layer, start:end].double()
        k = self.keys[layer, :end].double().repeat_interleave(shape.group, 1)
        v = self.values[layer, :end].double().repeat_interleave(shape.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
        reach = shape.reach(layer)
        if reach.cap:
            scores = reach.cap * torch.tanh(scores / reach.cap)
        behind = torch.arange(start, end)[:, None] - torch.arange(end)[None, :]
        hidden = (behind < 0) | (behind >= (reach.window or end))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def new_layers(
    shape: AttentionShape, pages: int, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """KV pages full of garbage, so that reading a row beyond the end changes the result."""
    size = (pages, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    return [torch.full(size, 1e3, dtype=dtype, device=device) for _ in range(LAYERS)]


class Bench:
    """A backend, its pages, and a fixed source of random sequences."""

    def __init__(
        self,
        backend: AttentionBackend,
        shape: AttentionShape,
        pages: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.backend = backend
        self.shape = shape
        self._dtype = dtype
        self._device = device
        self._random = torch.Generator().manual_seed(7)
        self._free = torch.randperm(pages, generator=self._random).tolist()

    def sequence(self, length: int) -> KnownSequence:
        pages = tuple(self._free.pop() for _ in range(blocks_for(length, self.shape.block_tokens)))
        return KnownSequence(pages, *(self._normal(length, h) for h in self._heads()))

    def run(self, parts: Sequence[tuple[KnownSequence, int, int]]) -> list[list[torch.Tensor]]:
        """Run one step over positions start .. end-1 of each sequence. Returns the outputs as [layer][sequence]."""
        told = ((start, end, sequence.pages) for sequence, start, end in parts)
        self.backend.plan(packed(self.shape.block_tokens, *told))
        return [self._layer(layer, parts) for layer in range(LAYERS)]

    def worst_error(self, parts: Sequence[tuple[KnownSequence, int, int]]) -> float:
        """The largest difference from the expected output in one step."""
        worst = 0.0
        for layer, outputs in enumerate(self.run(parts)):
            for output, (sequence, start, end) in zip(outputs, parts, strict=True):
                difference = output.double().cpu() - sequence.expected(self.shape, layer, start, end)
                worst = max(worst, float(difference.abs().max()))
        return worst

    def _layer(self, layer: int, parts: Sequence[tuple[KnownSequence, int, int]]) -> list[torch.Tensor]:
        def packed(kind: str) -> torch.Tensor:
            rows = [getattr(sequence, kind)[layer, start:end] for sequence, start, end in parts]
            return torch.cat(rows).to(self._device)

        self.backend.append(layer, packed("keys"), packed("values"))
        output = self.backend.run(layer, packed("queries"))
        return list(output.split([end - start for _, start, end in parts]))

    def _heads(self) -> tuple[int, int, int]:
        return self.shape.query_heads, self.shape.kv_heads, self.shape.kv_heads

    def _normal(self, length: int, heads: int) -> torch.Tensor:
        size = (LAYERS, length, heads, self.shape.head_dim)
        return torch.randn(size, generator=self._random).to(self._dtype)
