"""What the engine asks of a model, however it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from shared.engine.attention.api import AttentionBatch

AfterLayer = Callable[[int], None]


class Forward(Protocol):
    """A model over KV pages. One step at a time; not thread-safe."""

    def logits(
        self, batch: AttentionBatch, token_ids: torch.Tensor, keep: torch.Tensor, after_layer: AfterLayer | None
    ) -> torch.Tensor:
        """Logits [len(keep), vocab] of the rows `keep`, ascending, of a packed step; token_ids [tokens] and keep are
        int64 on the CPU. Calls after_layer(i), if given, in order, as soon as layer i's K and V of all rows are in the
        pages."""
        ...

    def fault(self) -> str:
        """Why it can never run again; empty while it can. Any thread may ask."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
