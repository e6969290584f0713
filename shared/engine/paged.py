"""An engine's KV pages: one tensor a layer, and the shared memory that the data plane reads and writes.

On the CPU both are the same memory. Beside a GPU the shared memory is a mirror of the pages on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shared.dataplane.arena import Arena
from shared.protocol.ids import AttemptId
from shared.protocol.model import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST_READERS = 64
"""Attempts remembered per page; beyond it a page is copied once more than it had to be."""


class Pages(Protocol):
    """KV pages as an engine's step uses them."""

    layers: list[torch.Tensor]
    """`[pages, 2, block_tokens, kv_heads, head_dim]` each, on the device that computes."""

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        """Before a step of an attempt over these pages: what landed in the shared memory for the first `filled` of
        them becomes readable."""
        ...

    def publish(self, first_layer: int, last_layer: int, pages: Sequence[int]) -> None:
        """Bring these layers of pages just written into the shared memory. On return they are there."""
        ...


def arena_layers(arena: Arena) -> list[torch.Tensor]:
    """The arena's own memory as tensors."""
    layout = arena.layout
    size = (arena.pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    return [
        torch.frombuffer(arena.layer_buffer(layer), dtype=DTYPES[layout.dtype]).view(size)
        for layer in range(layout.layers)
    ]


class SharedPages:
    """Pages that are the arena's memory: nothing to copy."""

    def __init__(self, arena: Arena) -> None:
        self.layers = arena_layers(arena)

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        pass

    def publish(self, first_layer: int, last_layer: int, pages: Sequence[int]) -> None:
        pass


class MirroredPages:
    """Pages on a device, mirrored in the arena.

    The mirror always holds everything: each step publishes what it wrote. So a page may be copied to the device at any
    moment between steps; it must be once per attempt, before the attempt first reads rows that it did not compute, as
    these may have landed in the mirror. Pages are given to another content only after all attempts on them have ended.
    """

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._mirror = arena_layers(arena)
        self._device = device
        layout: KVLayout = arena.layout
        size = (layout.layers, arena.pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self._pages = torch.zeros(size, dtype=DTYPES[layout.dtype], device=device)
        self.layers = list(self._pages.unbind(0))
        self._readers: dict[int, set[AttemptId]] = {}
        if device.type == "cuda":
            self._pin()

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        new = [page for page in pages[:filled] if attempt not in self._readers.get(page, ())]
        if new:
            on_device = torch.tensor(new, device=self._device)
            for layer, mirror in zip(self.layers, self._mirror, strict=True):
                layer[on_device] = mirror[new].to(self._device)
        for page in pages:
            readers = self._readers.setdefault(page, set())
            if len(readers) >= _MOST_READERS:
                readers.clear()
            readers.add(attempt)

    def publish(self, first_layer: int, last_layer: int, pages: Sequence[int]) -> None:
        if not pages:
            return
        on_device = torch.tensor(pages, device=self._device)
        copied = self._pages[first_layer : last_layer + 1].index_select(1, on_device).cpu()
        for mirror, layer in zip(self._mirror[first_layer : last_layer + 1], copied, strict=True):
            mirror[list(pages)] = layer

    def _pin(self) -> None:
        """Page-lock the mirror, so that copies run at the bus's speed. A refusal costs speed only."""
        runtime: Any = torch.cuda
        for mirror in self._mirror:
            runtime.cudart().cudaHostRegister(mirror.data_ptr(), mirror.numel() * mirror.element_size(), 0)
