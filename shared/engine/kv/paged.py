"""An engine's KV pages: one tensor per layer, and the shared memory that the data plane reads and writes.

On the CPU both are the same memory. With a GPU, the shared memory mirrors the pages on the device; see mirrored.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shared.dataplane.memory.arena import Arena
from shared.engine.attention.api import AttentionBatch
from shared.protocol.ids import AttemptId

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Outgoing(Protocol):
    """Copies the KV that one step writes into the shared memory."""

    def publish(self, layers: range, then: Callable[[], None] | None = None) -> None:
        """Begin to copy the step's KV of these layers, as launched so far. Calls `then` on this thread once it is in the
        shared memory: in the order of the `publish` calls, and in `settle` at the latest."""
        ...

    def settle(self) -> None:
        """On return, everything published is in the shared memory, and every `then` has been called."""
        ...


class Pages(Protocol):
    """KV pages as an engine's steps use them."""

    layers: list[torch.Tensor]
    """`[pages, 2, block_tokens, kv_heads, head_dim]` each, on the device that computes."""
    scrap: int | None
    """A page that is not in the shared memory, for rows that nothing reads. None: there is no such page."""

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        """Call this before a step of an attempt over these pages. KV that has arrived in the shared memory for the first
        `filled` of them becomes readable for the step."""
        ...

    def outgoing(self, batch: AttentionBatch) -> Outgoing:
        """Call this before a step computes. Drops what an earlier step published but did not settle: it is not copied,
        and its `then` is not called."""
        ...


def arena_pages(arena: Arena) -> torch.Tensor:
    """The memory of a layer-ordered arena: `[layers, pages, 2, block_tokens, kv_heads, head_dim]`."""
    layout = arena.layout
    size = (layout.layers, arena.pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    memory = arena.memory.view[: arena.size_bytes]
    return torch.frombuffer(memory, dtype=DTYPES[layout.dtype]).view(size)


def arena_layers(arena: Arena) -> list[torch.Tensor]:
    """The arena's memory as one tensor per layer: `[pages, 2, block_tokens, kv_heads, head_dim]` each."""
    layout = arena.layout
    size = (arena.pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    return [
        torch.frombuffer(arena.layer_buffer(layer), dtype=DTYPES[layout.dtype]).view(size)
        for layer in range(layout.layers)
    ]


class SharedPages:
    """Implements Pages on the arena's own memory: nothing is copied."""

    def __init__(self, arena: Arena) -> None:
        self.layers = arena_layers(arena)
        self.scrap: int | None = None

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        pass

    def outgoing(self, batch: AttentionBatch) -> InPlace:
        return _IN_PLACE


class InPlace:
    """Implements Outgoing where the pages are the shared memory: `then` is called at once."""

    def publish(self, layers: range, then: Callable[[], None] | None = None) -> None:
        if then is not None:
            then()

    def settle(self) -> None:
        pass


_IN_PLACE = InPlace()
