"""Pages in the shared memory itself, which needs no copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.dataplane.memory.arena import Arena  # noqa: E402
from shared.engine.attention.api import AttentionBatch, Span  # noqa: E402
from shared.engine.kv.paged import SharedPages, arena_layers, arena_pages  # noqa: E402
from shared.protocol.model import KVLayout  # noqa: E402

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=2, block_tokens=4, dtype="bfloat16", dtype_bytes=2)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(LAYOUT, 8)
    yield arena
    arena.close()


def test_a_tensor_is_a_slice_of_the_arena(arena: Arena) -> None:
    layers = SharedPages(arena).layers
    layers[1][3] = torch.arange(16).view(2, 4, 1, 2)
    read = torch.frombuffer(bytearray(arena.slice(3, 1)), dtype=torch.bfloat16)
    assert read.tolist() == list(range(16))
    assert bytes(arena.slice(3, 0)) == bytes(LAYOUT.slice_bytes)


def test_all_pages_are_the_same_memory(arena: Arena) -> None:
    arena_layers(arena)[1][3] = 5.0
    pages = arena_pages(arena)
    assert pages.shape == (2, 8, 2, 4, 1, 2)
    assert [(layer, page) for layer in range(2) for page in range(8) if pages[layer, page].any()] == [(1, 3)]


def test_what_is_published_is_told_at_once(arena: Arena) -> None:
    told: list[int] = []
    outgoing = SharedPages(arena).outgoing(AttentionBatch((Span(0, 1, (0,), 0),)))
    for layer in range(2):
        outgoing.publish(range(layer, layer + 1), lambda layer=layer: told.append(layer))
        assert told[-1] == layer
    outgoing.settle()
    assert told == [0, 1]
