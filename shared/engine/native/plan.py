"""One step's work, passed to the kernels once for all layers."""

from __future__ import annotations

import weakref
from itertools import accumulate

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape
from shared.engine.native.kernels import Kernels


class StepPlan:
    """The kernels' plan of the current step. `handle` is the plan's address, which the kernels take as an argument."""

    def __init__(self, kernels: Kernels, shape: AttentionShape) -> None:
        self._kernels = kernels
        self._block_tokens = shape.block_tokens
        self.handle: int = kernels.lib.tsukimi_plan_new(
            shape.query_heads, shape.kv_heads, shape.head_dim, shape.block_tokens, shape.scale
        )
        weakref.finalize(self, kernels.lib.tsukimi_plan_free, self.handle)
        self.slots = torch.empty(0, dtype=torch.long)
        """For each row, the slot of its keys: page * 2 * block_tokens + offset within the page. The slot of its values is
        block_tokens higher."""

    def set(self, batch: AttentionBatch) -> None:
        spans = batch.spans
        first_pages = [0, *accumulate(len(span.pages) for span in spans)]
        told = torch.tensor(
            [
                (span.start, span.tokens, span.first_row, page)
                for span, page in zip(spans, first_pages, strict=False)
            ],
            dtype=torch.int32,
        )
        pages = torch.tensor([page for span in spans for page in span.pages], dtype=torch.int32)
        self._kernels.lib.tsukimi_plan_set(
            self.handle, torch.get_num_threads(), told.data_ptr(), len(spans), pages.data_ptr(), len(pages)
        )
        block = self._block_tokens
        slots = torch.tensor(list(batch.slots(block)), dtype=torch.long)
        self.slots = slots + slots.div(block, rounding_mode="floor") * block
