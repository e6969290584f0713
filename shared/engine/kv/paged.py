"""An engine's KV pages: one tensor a layer, and the shared memory that the data plane reads and writes.

On the CPU both are the same memory. Beside a GPU the shared memory mirrors the pages on the device; see mirrored.py.
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
    """What one step writes, on its way into the shared memory."""

    def publish(self, layers: range, then: Callable[[], None] | None = None) -> None:
        """Bring what computing wrote so far into these layers. `then` is called on this thread when it is there: at the
        latest in settle, and in the order of the calls."""
        ...

    def settle(self) -> None:
        """On return all that was published is there, and whoever asked for it has been told."""
        ...


class Pages(Protocol):
    """KV pages as an engine's step uses them."""

    layers: list[torch.Tensor]
    """`[pages, 2, block_tokens, kv_heads, head_dim]` each, on the device that computes."""
    scrap: int | None
    """A page beside those of the shared memory, for rows that nobody reads; None: there is none."""

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        """Before a step of an attempt over these pages: what landed in the shared memory for the first `filled` of
        them becomes readable."""
        ...

    def outgoing(self, batch: AttentionBatch) -> Outgoing:
        """Before a step computes. What an earlier step has not settled is nobody's any more."""
        ...


def arena_pages(arena: Arena) -> torch.Tensor:
    """The memory of a layer-ordered arena: `[layers, pages, 2, block_tokens, kv_heads, head_dim]`."""
    layout = arena.layout
    size = (layout.layers, arena.pages, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    memory = arena.memory.view[: arena.size_bytes]
    return torch.frombuffer(memory, dtype=DTYPES[layout.dtype]).view(size)


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
        self.scrap: int | None = None

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        pass

    def outgoing(self, batch: AttentionBatch) -> InPlace:
        return _IN_PLACE


class InPlace:
    """Implements Outgoing: what is written is there."""

    def publish(self, layers: range, then: Callable[[], None] | None = None) -> None:
        if then is not None:
            then()

    def settle(self) -> None:
        pass


_IN_PLACE = InPlace()
