"""The general path: transformers' own modules, with their attention replaced by a backend's, over KV pages."""

from __future__ import annotations

from typing import Any

import torch

from shared.engine.attention.api import AttentionBackend, AttentionBatch, Reach
from shared.engine.paths.api import AfterLayer
from shared.engine.weights import transformers as hf


class GeneralPath:
    """Implements paths.api.Forward for any decoder-only model, on any device."""

    def __init__(self, model: Any, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend

    def logits(
        self,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        keep: torch.Tensor,
        after_layer: AfterLayer | None,
    ) -> torch.Tensor:
        device = self._model.device
        self._backend.plan(batch)
        positions = torch.tensor(list(batch.positions()), dtype=torch.long)
        step = Attending(self._backend, after_layer)
        return hf.forward(self._model, token_ids.to(device), positions.to(device), keep.to(device), step)

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to close."""


class Attending:
    """One forward pass over a planned step. Every layer calls `attend` instead of its own attention."""

    def __init__(self, backend: AttentionBackend, after_layer: AfterLayer | None = None) -> None:
        self._backend = backend
        self._after_layer = after_layer

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        reach: Reach,
    ) -> torch.Tensor:
        self._backend.append(layer, keys, values)
        if self._after_layer is not None:
            self._after_layer(layer)
        return self._backend.run(layer, queries)
