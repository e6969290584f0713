"""What FlashInfer's wrappers and kernels are told of a step, in their vocabulary.

Plans read the tables on the host, and would wait for the device to give them back from there: so they are given those of
the host. Only the page indices, the large one, are read on the device alone.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape, Reach
from shared.engine.attention.uploads import pinned, upload

LAYOUT = "NHD"


class PageTables:
    """Of one step."""

    def __init__(self, batch: AttentionBatch, block_tokens: int, device: torch.device) -> None:
        spans, ints = batch.spans, torch.int32
        self.indptr = pinned([0, *accumulate(len(span.pages) for span in spans)], ints, device)
        """On the host, as last_page and positions."""
        self.last_page = pinned([(span.end - 1) % block_tokens + 1 for span in spans], ints, device)
        self.positions = pinned(list(batch.positions()), ints, device)
        indices = pinned([page for span in spans for page in span.pages], ints, device)
        self.indices = upload(indices, device)
        """On the device."""

    @property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order of a plan's arguments."""
        return self.indptr, self.indices, self.last_page


def heads(shape: AttentionShape) -> tuple[int, int, int, int]:
    """In the order of a plan's arguments: query heads, KV heads, head_dim, page size."""
    return shape.query_heads, shape.kv_heads, shape.head_dim, shape.block_tokens


def variant(shape: AttentionShape, reach: Reach, dtype: torch.dtype) -> dict[str, Any]:
    """What else a plan is told by name."""
    told: dict[str, Any] = {"sm_scale": shape.scale, "q_data_type": dtype, "kv_data_type": dtype}
    if reach.window:
        told["window_left"] = reach.window - 1
    if reach.cap:
        told["logits_soft_cap"] = reach.cap
    return told


def uses_tensor_cores(shape: AttentionShape) -> bool:
    """Whether a decode step has enough query heads per KV head to fill their tiles."""
    return shape.group >= 4
