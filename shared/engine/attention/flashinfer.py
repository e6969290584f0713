"""Attention on NVIDIA GPUs by FlashInfer's paged kernels. Our page layout is its NHD layout.

Wrappers are planned once per step and run once per layer. The decode wrapper is used when every sequence computes one
token, else the prefill wrapper, which takes chunks, whole prompts and single tokens together. Window and cap are part of
a plan, so each distinct reach has its own wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import flashinfer
import torch

from shared.engine.attention.api import AttentionBackend, AttentionBatch, AttentionShape, Reach
from shared.engine.attention.flashinfer_fixed import FixedDecode
from shared.engine.attention.flashinfer_tables import LAYOUT, PageTables, heads, uses_tensor_cores, variant
from shared.engine.attention.uploads import pinned, upload
from shared.protocol.errors import Invalid

WORKSPACE_BYTES = 128 << 20
HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which both FlashInfer's attention and its append have kernels."""


class FlashInferAttention:
    """Implements attention.api.FixableBackend on a CUDA device, in float16 or bfloat16."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        """Raises Invalid for heads that FlashInfer has no kernels for."""
        if shape.head_dim not in HEAD_DIMS:
            raise Invalid(
                f"FlashInfer has no kernels for heads of {shape.head_dim}, only for {', '.join(map(str, HEAD_DIMS))}",
                param="model",
            )
        self._shape = shape
        self._layers = layers
        self._device = layers[0].device
        self._workspaces = {
            reach: torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            for reach in shape.distinct_reaches
        }
        self._wrappers = {
            reach: _Wrappers(shape, reach, workspace) for reach, workspace in self._workspaces.items()
        }

    def plan(self, batch: AttentionBatch) -> None:
        spans = batch.spans
        tables = PageTables(batch, self._shape.block_tokens, self._device)
        rows = [i for i, span in enumerate(spans) for _ in range(span.tokens)]
        self._page_indptr = upload(tables.indptr, self._device)
        self._page_indices = tables.indices
        self._last_page = upload(tables.last_page, self._device)
        self._rows = upload(pinned(rows, torch.int32, self._device), self._device)
        self._positions = upload(tables.positions, self._device)
        query_indptr = None
        if any(span.tokens > 1 for span in spans):
            bounds = [0, *accumulate(span.tokens for span in spans)]
            query_indptr = pinned(bounds, torch.int32, self._device)
        for wrappers in self._wrappers.values():
            wrappers.plan(query_indptr, tables, self._layers[0].dtype)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        flashinfer.append_paged_kv_cache(
            keys.to(self._layers[layer].dtype).contiguous(),  # FlashInfer would not convert but reinterpret
            values.to(self._layers[layer].dtype).contiguous(),
            self._rows,
            self._positions,
            self._layers[layer],
            self._page_indices,
            self._page_indptr,
            self._last_page,
            LAYOUT,
        )

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        wrapper = self._wrappers[self._shape.reach(layer)].planned
        output: torch.Tensor = wrapper.run(queries.contiguous(), self._layers[layer])
        return output

    def fixed(self, rows: int, pages_per_sequence: int) -> AttentionBackend:
        return FixedDecode(self._shape, self._layers, self._workspaces, rows, rows * pages_per_sequence)


class _Wrappers:
    """FlashInfer's two wrappers for layers of one reach."""

    def __init__(self, shape: AttentionShape, reach: Reach, workspace: torch.Tensor) -> None:
        self._shape = shape
        self._reach = reach
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, LAYOUT, use_tensor_cores=uses_tensor_cores(shape)
        )
        self.planned: Any = None

    def plan(self, query_indptr: torch.Tensor | None, tables: PageTables, dtype: torch.dtype) -> None:
        """`query_indptr` is None if every sequence computes one token."""
        told = (*tables.pages, *heads(self._shape))
        kind = variant(self._shape, self._reach, dtype)
        if query_indptr is None:
            self.planned = self._decode
            self._decode.plan(*told, **kind)
            return
        self.planned = self._prefill
        self._prefill.plan(query_indptr, *told, causal=True, **kind)
