"""Pages beside another device: the mirror holds everything, and what lands in it is seen by whoever reads next.

Device and host are one here. All is run by a lane that works at once, and by one that works as late as it may.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.dataplane.memory.arena import Arena  # noqa: E402
from shared.engine.attention.api import AttentionBatch  # noqa: E402
from shared.engine.kv.mirrored import MirroredPages  # noqa: E402
from shared.engine.kv.paged import arena_layers  # noqa: E402
from shared.engine.staging.lanes import HostLane  # noqa: E402
from shared.engine.staging.stager import BUFFERS  # noqa: E402
from shared.protocol.errors import Invalid  # noqa: E402
from shared.protocol.model import KVLayout  # noqa: E402
from tests.support.engine.packed import packed  # noqa: E402
from tests.support.fakes.late_lane import LateLane  # noqa: E402

LAYOUT = KVLayout(layers=5, kv_heads=1, head_dim=2, block_tokens=8, dtype="bfloat16", dtype_bytes=2)
PAGES = 12


class World:
    def __init__(self, lane: Any, slices_per_buffer: int, layout: KVLayout = LAYOUT) -> None:
        self.arena = Arena(layout, PAGES)
        self.lane = lane
        staging = BUFFERS * slices_per_buffer * layout.slice_bytes
        self.pages = MirroredPages(self.arena, torch.device("cpu"), staging, lane)

    def land(self, page: int, value: float) -> None:
        for layer, pages in enumerate(arena_layers(self.arena)):
            pages[page] = value + layer

    def on_device(self, page: int) -> set[float]:
        """What each layer's page holds, less the layer, as computing sees it."""
        if isinstance(self.lane, LateLane):
            self.lane.compute()
        return {float(x) - i for i, layer in enumerate(self.pages.layers) for x in layer[page].flatten()}

    def compute(self, batch: AttentionBatch, layer: int, value: float) -> None:
        """Write a layer's rows of a step."""
        if isinstance(self.lane, LateLane):
            self.lane.compute()
        for slot in batch.slots(LAYOUT.block_tokens):
            page, row = divmod(slot, LAYOUT.block_tokens)
            self.pages.layers[layer][page, :, row] = value

    def same(self, batch: AttentionBatch) -> bool:
        """Whether the mirror has the step's sequences, bit by bit."""
        mirror = arena_layers(self.arena)
        return all(
            torch.equal(mirror[layer][page, :, row].view(torch.int16), device[page, :, row].view(torch.int16))
            for layer, device in enumerate(self.pages.layers)
            for span in batch.spans
            for position in range(span.end)
            for page, row in [(span.pages[position // LAYOUT.block_tokens], position % LAYOUT.block_tokens)]
        )


@pytest.fixture(params=[1, 3, 100], ids="{} slices a buffer".format)
def size(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[HostLane, LateLane])
def world(request: pytest.FixtureRequest, size: int) -> Iterator[World]:
    world = World(request.param(), size)
    yield world
    del world.pages
    world.arena.close()


step = partial(packed, LAYOUT.block_tokens)


def test_landed_blocks_are_copied_before_their_first_use(world: World) -> None:
    for page in (5, 2, 9, 7):
        world.land(page, 10.0 * page)
    world.pages.prepare("a", [5, 2, 9, 7, 6], filled=4)
    assert [world.on_device(page) for page in (5, 2, 9, 7)] == [{50.0}, {20.0}, {90.0}, {70.0}]
    assert world.on_device(6) == {-i for i in range(LAYOUT.layers)}


def test_many_loads_through_few_buffers(world: World) -> None:
    for page in range(PAGES):
        world.land(page, 10.0 * page)
        world.pages.prepare(f"a{page}", [page], filled=1)
    assert [world.on_device(page) for page in range(PAGES)] == [{10.0 * page} for page in range(PAGES)]


def test_what_an_attempt_computed_is_not_overwritten_by_the_mirror(world: World) -> None:
    world.pages.prepare("a", [2], filled=0)
    world.pages.layers[0][2] = 3.0
    world.pages.prepare("a", [2], filled=1)
    assert 3.0 in world.on_device(2)


def test_a_page_given_to_another_attempt_is_read_anew(world: World) -> None:
    world.land(1, 10.0)
    world.pages.prepare("a", [1], filled=1)
    world.land(1, 20.0)
    world.pages.prepare("b", [1], filled=1)
    assert world.on_device(1) == {20.0}


def test_a_prefix_read_by_very_many_stays_right(world: World) -> None:
    world.land(0, 40.0)
    for attempt in range(200):
        world.pages.prepare(str(attempt), [0], filled=1)
    assert world.on_device(0) == {40.0}


def test_layers_go_out_while_later_ones_are_computed_and_are_told_in_order(world: World) -> None:
    batch = step((0, 19, (3, 8, 1)), (4, 10, (6, 2)))
    told: list[tuple[int, float]] = []
    outgoing = world.pages.outgoing(batch)

    def tell(layer: int) -> None:
        told.append((layer, float(arena_layers(world.arena)[layer][8].max())))

    for layer in range(LAYOUT.layers):
        world.compute(batch, layer, 1.5 + layer)
        outgoing.publish(range(layer, layer + 1), lambda layer=layer: tell(layer))
    outgoing.settle()
    assert told == [(layer, 1.5 + layer) for layer in range(LAYOUT.layers)]
    assert world.same(batch)


def test_nothing_is_waited_for_before_the_end_while_there_are_buffers() -> None:
    world = World(LateLane(), 100)
    batch = step((0, 19, (3, 8, 1)))
    outgoing = world.pages.outgoing(batch)
    told: list[int] = []
    for layer in range(LAYOUT.layers):
        outgoing.publish(range(layer, layer + 1), lambda layer=layer: told.append(layer))
    assert told == []
    assert len(world.lane.waiting) == LAYOUT.layers
    world.lane.advance()
    world.lane.advance()
    outgoing.publish(range(1))
    assert told == [0, 1]
    outgoing.settle()
    assert told == [0, 1, 2, 3, 4]


def test_no_more_copies_are_in_flight_than_there_are_buffers() -> None:
    world = World(LateLane(), 1)
    batch = step((0, 90, tuple(range(12))))
    outgoing = world.pages.outgoing(batch)
    for layer in range(LAYOUT.layers):
        world.compute(batch, layer, 2.0 + layer)
        outgoing.publish(range(layer, layer + 1))
    assert world.lane.most_waiting == len(world.lane.buffers) == BUFFERS
    outgoing.settle()
    assert world.same(batch)


def test_decoded_rows_reach_the_mirror_and_leave_the_rest_of_it_alone(world: World) -> None:
    world.land(4, 50.0)
    batch = step((3, 4, (4,)), (8, 9, (7, 5)))
    outgoing = world.pages.outgoing(batch)
    for layer in range(LAYOUT.layers):
        world.compute(batch, layer, 7.0)
    outgoing.publish(range(LAYOUT.layers))
    outgoing.settle()
    for layer, mirror in enumerate(arena_layers(world.arena)):
        assert bool((mirror[4, :, 3] == 7.0).all())
        assert bool((mirror[4, :, :3] == 50.0 + layer).all())
        assert bool((mirror[5, :, 0] == 7.0).all())
        assert not bool(mirror[7].any())


def test_bits_are_copied_whatever_they_mean(world: World) -> None:
    batch = step((0, 8, (3,)))
    odd = torch.tensor([0x7FC1, 0x7F81, -1, 1], dtype=torch.int16).view(torch.bfloat16)
    for layer in world.pages.layers:
        layer[3] = odd.repeat(8).view(layer[3].shape)
    outgoing = world.pages.outgoing(batch)
    outgoing.publish(range(LAYOUT.layers))
    outgoing.settle()
    assert world.same(batch)
    world.pages.prepare("again", [3], filled=1)
    world.on_device(3)
    assert world.same(batch)


def test_a_step_that_failed_tells_nobody_later(world: World) -> None:
    batch = step((0, 8, (3,)))
    told: list[str] = []
    world.pages.outgoing(batch).publish(range(1), lambda: told.append("first"))
    before = list(told)
    second = world.pages.outgoing(batch)
    second.publish(range(1), lambda: told.append("second"))
    second.settle()
    assert told == [*before, "second"]
    assert before == [] or not isinstance(world.lane, LateLane)


def test_the_scrap_page_is_none_of_the_mirrors(world: World) -> None:
    assert world.pages.scrap == PAGES == world.arena.pages
    assert all(len(layer) == PAGES + 1 for layer in world.pages.layers)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (3, 4), (1, 2), (1, 1)])
def test_rows_of_any_width(kv_heads: int, head_dim: int) -> None:
    layout = KVLayout(5, kv_heads, head_dim, 8, "bfloat16", 2)
    world = World(HostLane(), 2, layout)
    world.land(6, 10.0)
    world.pages.prepare("a", [6], filled=1)
    assert world.on_device(6) == {10.0}
    world.pages.layers[2][6, :, 1] = 99.0
    outgoing = world.pages.outgoing(step((1, 2, (6,))))
    outgoing.publish(range(5))
    outgoing.settle()
    assert bool((arena_layers(world.arena)[2][6, :, 1] == 99.0).all())


def test_too_little_staging_memory_is_refused() -> None:
    arena = Arena(LAYOUT, 2)
    with pytest.raises(Invalid, match="staging_bytes"):
        MirroredPages(arena, torch.device("cpu"), BUFFERS * LAYOUT.slice_bytes - 1)
    arena.close()
