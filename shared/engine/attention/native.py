"""Attention on the CPU by the C++ kernels, which read the pages in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape
from shared.engine.native.kernels import Kernels
from shared.engine.native.plan import StepPlan

DTYPES = (torch.float32, torch.bfloat16)
"""Types of KV pages that the kernels support."""
MAX_HEAD_DIM = 512


def computes(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the kernels support this attention."""
    return dtype in DTYPES and shape.head_dim % 8 == 0 and shape.head_dim <= MAX_HEAD_DIM


class NativeAttention:
    """Implements attention.api.AttentionBackend. A row's output is bit-identical whatever other sequences are in the
    step and however many threads compute."""

    def __init__(self, shape: AttentionShape, layers: Sequence[torch.Tensor], kernels: Kernels) -> None:
        assert computes(shape, layers[0].dtype)
        self._shape = shape
        self._layers = layers
        self._kernels = kernels
        self.plan_of_step = StepPlan(kernels, shape)

    def plan(self, batch: AttentionBatch) -> None:
        self.plan_of_step.set(batch)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self._layers[layer].view(-1, self._shape.kv_heads, self._shape.head_dim)
        slots = self.plan_of_step.slots
        rows.index_copy_(0, slots, keys)
        rows.index_copy_(0, slots + self._shape.block_tokens, values)

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        pages, reach = self._layers[layer], self._shape.reach(layer)
        rows = queries.float().contiguous()
        output = torch.empty_like(rows)
        self._kernels.lib.tsukimi_attend(
            self.plan_of_step.handle,
            torch.get_num_threads(),
            pages.element_size(),
            pages.data_ptr(),
            reach.window,
            reach.cap,
            rows.data_ptr(),
            output.data_ptr(),
        )
        return output.to(queries.dtype)
