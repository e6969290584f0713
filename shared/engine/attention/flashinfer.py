"""Attention on NVIDIA GPUs by FlashInfer's paged kernels, whose NHD page layout is ours.

Both wrappers are planned once per step and run once per layer: the decode wrapper when every sequence computes one
token, else the prefill wrapper, which takes chunks, whole prompts and single tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import flashinfer
import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape

WORKSPACE_BYTES = 128 << 20
_LAYOUT = "NHD"


class FlashInferAttention:
    """Implements attention.api.AttentionBackend on a CUDA device, in float16 or bfloat16."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor]) -> None:
        self._shape = shape
        self._layers = layers
        self._device = layers[0].device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, _LAYOUT, use_tensor_cores=shape.group >= 4
        )
        self._wrapper: Any = None

    def plan(self, batch: AttentionBatch) -> None:
        shape, spans, dtype = self._shape, batch.spans, self._layers[0].dtype
        self._page_indptr = self._ints([0, *accumulate(len(span.pages) for span in spans)])
        self._page_indices = self._ints([page for span in spans for page in span.pages])
        self._last_page = self._ints([(span.end - 1) % shape.block_tokens + 1 for span in spans])
        self._rows = self._ints([i for i, span in enumerate(spans) for _ in range(span.tokens)])
        self._positions = self._ints(list(batch.positions()))
        if all(span.tokens == 1 for span in spans):
            self._wrapper = self._decode
            self._decode.plan(
                self._page_indptr,
                self._page_indices,
                self._last_page,
                shape.query_heads,
                shape.kv_heads,
                shape.head_dim,
                shape.block_tokens,
                q_data_type=dtype,
                kv_data_type=dtype,
                sm_scale=shape.scale,
            )
            return
        self._wrapper = self._prefill
        self._prefill.plan(
            self._ints([0, *accumulate(span.tokens for span in spans)]),
            self._page_indptr,
            self._page_indices,
            self._last_page,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_tokens,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

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
        output: torch.Tensor = self._wrapper.run(queries.contiguous(), self._layers[layer])
        return output

    def _ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
