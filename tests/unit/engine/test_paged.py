"""Pages beside another device: the mirror holds everything, and what lands in it is seen by whoever reads next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.dataplane.arena import Arena  # noqa: E402
from shared.engine.paged import MirroredPages, SharedPages, arena_layers  # noqa: E402
from shared.protocol.model import KVLayout  # noqa: E402

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=2, block_tokens=4, dtype="bfloat16", dtype_bytes=2)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(LAYOUT, 8)
    yield arena
    arena.close()


@pytest.fixture
def pages(arena: Arena) -> MirroredPages:
    return MirroredPages(arena, torch.device("cpu"))


def land(arena: Arena, page: int, value: float) -> None:
    for layer in arena_layers(arena):
        layer[page] = value


def on_device(pages: MirroredPages, page: int) -> set[Any]:
    return {float(x) for layer in pages.layers for x in layer[page].flatten()}


def test_a_tensor_is_a_slice_of_the_arena(arena: Arena) -> None:
    layers = SharedPages(arena).layers
    layers[1][3] = torch.arange(16).view(2, 4, 1, 2)
    read = torch.frombuffer(bytearray(arena.slice(3, 1)), dtype=torch.bfloat16)
    assert read.tolist() == list(range(16))
    assert bytes(arena.slice(3, 0)) == bytes(LAYOUT.slice_bytes)


def test_landed_blocks_are_copied_before_their_first_use(arena: Arena, pages: MirroredPages) -> None:
    land(arena, 5, 7.0)
    pages.prepare("a", [5, 6], filled=1)
    assert on_device(pages, 5) == {7.0}
    assert on_device(pages, 6) == {0.0}


def test_what_an_attempt_computed_is_not_overwritten_by_the_mirror(
    arena: Arena, pages: MirroredPages
) -> None:
    pages.prepare("a", [2], filled=0)
    pages.layers[0][2] = 3.0
    pages.prepare("a", [2], filled=1)
    assert on_device(pages, 2) == {3.0, 0.0}


def test_a_page_given_to_another_attempt_is_read_anew(arena: Arena, pages: MirroredPages) -> None:
    land(arena, 1, 1.0)
    pages.prepare("a", [1], filled=1)
    land(arena, 1, 2.0)
    pages.prepare("b", [1], filled=1)
    assert on_device(pages, 1) == {2.0}


def test_published_pages_are_in_the_shared_memory(arena: Arena, pages: MirroredPages) -> None:
    pages.layers[0][4] = 1.5
    pages.layers[1][4] = 2.5
    pages.layers[1][3] = 9.0
    pages.publish(0, 0, [4])
    assert float(arena_layers(arena)[0][4].max()) == 1.5
    assert float(arena_layers(arena)[1][4].max()) == 0.0
    pages.publish(0, 1, [4])
    assert float(arena_layers(arena)[1][4].max()) == 2.5
    assert float(arena_layers(arena)[1][3].max()) == 0.0


def test_a_prefix_read_by_very_many_stays_right(arena: Arena, pages: MirroredPages) -> None:
    land(arena, 0, 4.0)
    for attempt in range(200):
        pages.prepare(str(attempt), [0], filled=1)
    assert on_device(pages, 0) == {4.0}
