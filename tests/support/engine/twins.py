"""Runs one model with and without captured decode steps, each over its own pages. Both begin with equal pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.attention.api import AttentionShape
from shared.engine.graphs.sizes import capture_sizes
from shared.engine.paths.general import GeneralPath
from shared.engine.paths.graphed import GraphedPath
from shared.engine.weights import transformers as hf
from tests.support.engine.packed import packed

GARBAGE = 1e3
Part = tuple[int, int, tuple[int, ...]]
"""(start, end, pages): positions start .. end-1 of a sequence, and its pages."""


def waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the forward pass to read a value from the device. Such a step cannot be captured."""
    real = hf.forward

    def waits(model: Any, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        int(token_ids[0])
        return real(model, token_ids, *rest)

    monkeypatch.setattr(hf, "forward", waits)


class Twins:
    def __init__(
        self,
        folder: Path,
        capture: Callable[[Any], Any],
        backend: Callable[[AttentionShape, Any], Any],
        *,
        most: int = 4,
        pages: int = 40,
        block: int = 4,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        on = torch.device(device)
        self.block, self.pages = block, pages
        self.model = hf.load_model(folder, dtype, on)
        seen = hf.probe(self.model)
        shape = AttentionShape(
            seen.query_heads, seen.kv_heads, seen.head_dim, block, seen.scale, seen.reaches
        )
        size = (pages + 1, 2, block, seen.kv_heads, seen.head_dim)
        self.layers, self.plain_layers = (
            [torch.full(size, GARBAGE, dtype=dtype, device=on) for _ in range(seen.layers)] for _ in range(2)
        )
        self.backend = backend(shape, self.layers)
        self.scrap = pages
        self.graphed = GraphedPath(self.model, self.backend, self.scrap, seen.layers)
        self.progress: list[float] = []
        self.graphed.capture(capture_sizes(most), pages, capture(on), self.progress.append)
        self.as_captured = [layer.clone() for layer in self.layers]
        self.plain = GeneralPath(self.model, backend(shape, self.plain_layers))

    def run(self, parts: list[Part], told: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step with made-up tokens. Returns all rows' logits, with and without captures."""
        batch = packed(self.block, *parts)
        ids = [(7 * at + 13 * s.pages[0]) % 300 + 1 for s in batch.spans for at in range(s.start, s.end)]
        given = batch, torch.tensor(ids), torch.arange(len(ids))
        with torch.inference_mode():
            after = None if told is None else told.append
            return self.graphed.logits(*given, after), self.plain.logits(*given, None)

    def spoil(self) -> None:
        """Fill all pages with garbage again."""
        for layer in (*self.layers, *self.plain_layers):
            layer.fill_(GARBAGE)

    def same_pages(self, tolerance: float = 1e-4) -> bool:
        """Whether all pages of the two agree within the tolerance, garbage included. The scrap pages are not compared."""
        pairs = zip(self.layers, self.plain_layers, strict=True)
        most = self.pages
        return all(torch.allclose(a[:most], b[:most], rtol=tolerance, atol=tolerance) for a, b in pairs)

    def touched(self) -> list[set[int]]:
        """For each layer, the pages that hold anything but garbage. The scrap page is not included."""
        return [
            {page for page in range(self.pages) if bool((layer[page] != GARBAGE).any())}
            for layer in self.layers
        ]


def worst(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest difference between the two, relative to the largest plain logit."""
    graphed, plain = (logits.float() for logits in pair)
    assert graphed.shape == plain.shape
    return float((graphed - plain).abs().max() / plain.abs().max())
