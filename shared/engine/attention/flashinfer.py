"""Attention on NVIDIA GPUs by FlashInfer's paged kernels, whose NHD page layout is ours.

Wrappers are planned once per step and run once per layer: the decode wrapper when every sequence computes one token,
else the prefill wrapper, which takes chunks, whole prompts and single tokens together. A window is part of a plan, so
layers that see differently far have wrappers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import flashinfer
import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape, Reach

WORKSPACE_BYTES = 128 << 20
_LAYOUT = "NHD"


class FlashInferAttention:
    """Implements attention.api.AttentionBackend on a CUDA device, in float16 or bfloat16."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        self._shape = shape
        self._layers = layers
        self._device = layers[0].device
        self._wrappers = {
            reach: _Wrappers(
                shape, reach, torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            )
            for reach in shape.distinct_reaches
        }
        """Each with a workspace of its own: a plan keeps its tables there until its last run."""

    def plan(self, batch: AttentionBatch) -> None:
        spans = batch.spans
        self._page_indptr = self._ints([0, *accumulate(len(span.pages) for span in spans)])
        self._page_indices = self._ints([page for span in spans for page in span.pages])
        self._last_page = self._ints([(span.end - 1) % self._shape.block_tokens + 1 for span in spans])
        self._rows = self._ints([i for i, span in enumerate(spans) for _ in range(span.tokens)])
        self._positions = self._ints(list(batch.positions()))
        pages = (self._page_indptr, self._page_indices, self._last_page)
        decode = all(span.tokens == 1 for span in spans)
        query_indptr = None if decode else self._ints([0, *accumulate(span.tokens for span in spans)])
        for wrappers in self._wrappers.values():
            wrappers.plan(query_indptr, pages, self._layers[0].dtype)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        flashinfer.append_paged_kv_cache(
            keys.contiguous(),
            values.contiguous(),
            self._rows,
            self._positions,
            self._layers[layer],
            self._page_indices,
            self._page_indptr,
            self._last_page,
            _LAYOUT,
        )

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        wrapper = self._wrappers[self._shape.reach(layer)].planned
        output: torch.Tensor = wrapper.run(queries.contiguous(), self._layers[layer])
        return output

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


class _Wrappers:
    """FlashInfer's two wrappers for layers of one reach."""

    def __init__(self, shape: AttentionShape, reach: Reach, workspace: torch.Tensor) -> None:
        self._shape = shape
        self._reach: dict[str, Any] = {}
        if reach.window:
            self._reach["window_left"] = reach.window - 1
        if reach.cap:
            self._reach["logits_soft_cap"] = reach.cap
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, _LAYOUT, use_tensor_cores=shape.group >= 4
        )
        self.planned: Any = None

    def plan(
        self,
        query_indptr: torch.Tensor | None,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """query_indptr None: every sequence computes one token. `pages`: indptr, indices, length of the last page."""
        shape = self._shape
        heads = (shape.query_heads, shape.kv_heads, shape.head_dim, shape.block_tokens)
        types = {"q_data_type": dtype, "kv_data_type": dtype}
        if query_indptr is None:
            self.planned = self._decode
            self._decode.plan(*pages, *heads, sm_scale=shape.scale, **types, **self._reach)
            return
        self.planned = self._prefill
        self._prefill.plan(
            query_indptr, *pages, *heads, causal=True, sm_scale=shape.scale, **types, **self._reach
        )
