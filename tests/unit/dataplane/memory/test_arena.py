"""Arena and Memory: layouts, accounting, refusals, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest

from shared.dataplane.api import PageStore
from shared.dataplane.memory.anonymous import TOUCH_STRIDE_BYTES, Memory
from shared.dataplane.memory.arena import Arena, Order
from shared.protocol.errors import Invalid, TooLarge
from shared.protocol.model import KVLayout

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=5, dtype="float32", dtype_bytes=4)


@pytest.mark.parametrize("order", get_args(Order))
def test_every_slice_has_its_own_bytes(order: Order) -> None:
    arena = Arena(LAYOUT, 7, order)
    store: PageStore = arena
    for page in range(7):
        for layer in range(3):
            store.slice(page, layer)[:] = bytes([page * 3 + layer]) * LAYOUT.slice_bytes
    for page in range(7):
        for layer in range(3):
            assert bytes(store.slice(page, layer)) == bytes([page * 3 + layer]) * LAYOUT.slice_bytes
    assert arena.size_bytes == 7 * LAYOUT.block_bytes == arena.memory.size_bytes
    arena.close()


def test_a_layer_is_one_buffer_in_layer_order() -> None:
    arena = Arena(LAYOUT, 4, "layer")
    arena.slice(2, 1)[:] = b"x" * LAYOUT.slice_bytes
    layer = arena.layer_buffer(1)
    assert len(layer) == 4 * LAYOUT.slice_bytes
    assert bytes(layer[2 * LAYOUT.slice_bytes : 3 * LAYOUT.slice_bytes]) == b"x" * LAYOUT.slice_bytes
    assert sum(layer) == ord("x") * LAYOUT.slice_bytes


def test_a_page_ordered_arena_has_no_layer_buffer() -> None:
    with pytest.raises(Invalid):
        Arena(LAYOUT, 4, "page").layer_buffer(0)


def test_extents_merge_neighbours() -> None:
    size = LAYOUT.slice_bytes
    by_page, by_layer = Arena(LAYOUT, 4, "page"), Arena(LAYOUT, 4, "layer")
    assert by_page.extents(by_page.block_slices([1, 2])) == [(3 * size, 6 * size)]
    assert by_layer.extents([(1, 0), (2, 0), (0, 1)]) == [(size, 2 * size), (4 * size, size)]
    assert by_layer.extents([]) == []


@pytest.mark.parametrize(("page", "layer"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_nothing_outside_the_arena_is_reachable(page: int, layer: int) -> None:
    with pytest.raises(IndexError):
        Arena(LAYOUT, 4).slice(page, layer)


def test_more_than_the_host_has_is_refused_naming_both_sizes() -> None:
    with pytest.raises(TooLarge, match=rf"{1 << 50} bytes .* \d+ are available"):
        Memory(1 << 50)


def test_a_memory_too_small_for_the_pages_is_refused() -> None:
    memory = Memory(LAYOUT.block_bytes)
    with pytest.raises(TooLarge, match=str(2 * LAYOUT.block_bytes)):
        Arena(LAYOUT, 2, memory=memory)
    memory.close()


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    size = TOUCH_STRIDE_BYTES + 4096
    Memory(size, lambda done, total: seen.append((done, total))).close()
    assert seen == [(TOUCH_STRIDE_BYTES, size), (size, size)]


def test_closing_twice_and_with_views_out_is_harmless() -> None:
    arena = Arena(LAYOUT, 2)
    view = arena.slice(1, 1)
    view[:1] = b"k"
    arena.close()
    arena.close()
    assert view[0] == ord("k")


def test_the_descriptor_handed_out_cannot_write() -> None:
    memory = Memory(8192)
    memory.view[:3] = b"abc"
    fd = memory.read_only_fd()
    try:
        assert os.pread(fd, 3, 0) == b"abc"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    finally:
        os.close(fd)
        memory.close()


def test_nothing_appears_in_dev_shm() -> None:
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set()
    arena = Arena(LAYOUT, 2)
    after = set(shm.iterdir()) if shm.exists() else set()
    assert after <= before or all(LAYOUT.block_bytes * 2 != path.stat().st_size for path in after - before)
    arena.close()
