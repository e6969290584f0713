"""The protocol of a model's forward pass, independent of what computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from shared.engine.attention.api import AttentionBatch

AfterLayer = Callable[[int], None]


class Forward(Protocol):
    """A model over KV pages. One step at a time; not thread-safe."""

    def logits(
        self,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        keep: torch.Tensor,
        after_layer: AfterLayer | None,
    ) -> torch.Tensor:
        """Logits [len(keep), vocab] of the rows `keep` of a packed step. `token_ids` [tokens] and `keep`, ascending, are
        int64 on the CPU. If `after_layer` is given, calls after_layer(i) in order of layers, as soon as layer i's K and V
        of all rows are in the pages."""
        ...

    def fault(self) -> str:
        """Why it can never run again; empty while it can. Any thread may call this."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
