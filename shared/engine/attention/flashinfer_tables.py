"""Converts a step into the arguments of FlashInfer's wrappers and kernels.

FlashInfer's plans read the tables on the host; given device tensors, they would copy them back and wait for the device.
So they get host tensors. Only the page indices, the largest table, are read on the device alone and lie there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape, Reach
from shared.engine.attention.uploads import pinned, upload

LAYOUT = "NHD"


class PageTables:
    """The page tables of one step."""

    def __init__(self, batch: AttentionBatch, block_tokens: int, device: torch.device) -> None:
        spans, ints = batch.spans, torch.int32
        self.indptr = pinned([0, *accumulate(len(span.pages) for span in spans)], ints, device)
        """On the host, like last_page and positions."""
        self.last_page = pinned([(span.end - 1) % block_tokens + 1 for span in spans], ints, device)
        self.positions = pinned(list(batch.positions()), ints, device)
        indices = pinned([page for span in spans for page in span.pages], ints, device)
        self.indices = upload(indices, device)
        """On the device."""

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """indptr, indices and last_page, in the order of a plan's arguments."""
        return self.indptr, self.indices, self.last_page


def heads(shape: AttentionShape) -> tuple[int, int, int, int]:
    """In the order of a plan's arguments: query heads, KV heads, head_dim, page size."""
    return shape.query_heads, shape.kv_heads, shape.head_dim, shape.block_tokens


def variant(shape: AttentionShape, reach: Reach, dtype: torch.dtype) -> dict[str, Any]:
    """The keyword arguments of a plan: scale, types, window and cap."""
    told: dict[str, Any] = {"sm_scale": shape.scale, "q_data_type": dtype, "kv_data_type": dtype}
    if reach.window:
        told["window_left"] = reach.window - 1
    if reach.cap:
        told["logits_soft_cap"] = reach.cap
    return told


def uses_tensor_cores(shape: AttentionShape) -> bool:
    """Whether there are enough query heads per KV head to fill the tensor cores' tiles in a decode step."""
    return shape.group >= 4
