"""KV between the GPU and the shared memory: the same bytes, beside the computing, whatever the ring's size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.dataplane.memory.arena import Arena  # noqa: E402
from shared.engine.kv.mirrored import MirroredPages  # noqa: E402
from shared.engine.kv.paged import arena_layers  # noqa: E402
from shared.engine.staging.stager import BUFFERS  # noqa: E402
from shared.protocol.model import KVLayout  # noqa: E402
from tests.support.engine.packed import packed  # noqa: E402

LAYOUT = KVLayout(layers=6, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16", dtype_bytes=2)
PAGES = 64
BUSY_CYCLES = 500_000_000


class World:
    def __init__(self, slices_per_buffer: int) -> None:
        self.arena = Arena(LAYOUT, PAGES)
        staging = BUFFERS * slices_per_buffer * LAYOUT.slice_bytes
        self.pages = MirroredPages(self.arena, torch.device("cuda"), staging)
        self.mirror = [layer.view(torch.int16) for layer in arena_layers(self.arena)]

    def compute(self, layer: int, seed: int) -> None:
        """Other bits for all of a layer, by the stream that computes, and not soon."""
        torch.cuda._sleep(BUSY_CYCLES // 50)
        pages = self.pages.layers[layer].view(torch.int16)
        generator = torch.Generator("cuda").manual_seed(100 * seed + layer)
        pages.copy_(
            torch.randint(-30000, 30000, pages.shape, dtype=torch.int16, device="cuda", generator=generator)
        )

    def compute_all(self, seed: int) -> None:
        for layer in range(LAYOUT.layers):
            self.compute(layer, seed)

    def device_bits(self, layer: int) -> torch.Tensor:
        return self.pages.layers[layer].view(torch.int16).cpu()


@pytest.fixture(params=[1, 5, 100])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    torch.cuda.synchronize()
    del world.pages, world.mirror
    world.arena.close()


step = partial(packed, LAYOUT.block_tokens)


PROMPT = step((0, 500, tuple(range(40, 8, -1))), (30, 64, (41, 2, 50, 1)))


def test_layers_arrive_byte_by_byte_and_in_order(world: World) -> None:
    outgoing = world.pages.outgoing(PROMPT)
    arrived: list[torch.Tensor] = []
    for layer in range(LAYOUT.layers):
        world.compute(layer, 1)
        outgoing.publish(
            range(layer, layer + 1), lambda mirror=world.mirror[layer]: arrived.append(mirror.clone())
        )
    outgoing.settle()
    pages = [page for span in PROMPT.spans for page in span.pages[span.start // 16 :]]
    assert len(arrived) == LAYOUT.layers
    for layer, mirror in enumerate(arrived):
        assert torch.equal(mirror[pages], world.device_bits(layer)[pages])


def test_nobody_waits_for_a_device_that_is_busy() -> None:
    world = World(100)
    world.compute_all(1)
    first = world.pages.outgoing(PROMPT)  # memory and kernels of the lane: what is made at first use may wait
    first.publish(range(LAYOUT.layers))
    first.settle()
    torch.cuda.synchronize()
    outgoing = world.pages.outgoing(PROMPT)
    told: list[int] = []
    torch.cuda._sleep(BUSY_CYCLES)
    for layer in range(LAYOUT.layers):
        outgoing.publish(range(layer, layer + 1), lambda layer=layer: told.append(layer))
    assert told == [], "publishing waited for the device"
    outgoing.settle()
    assert told == list(range(LAYOUT.layers))
    del world.pages, world.mirror, outgoing
    world.arena.close()


def test_decoded_rows(world: World) -> None:
    world.compute_all(3)
    batch = step((20, 21, (7, 9)), (15, 16, (3,)), (32, 33, (5, 6, 4)))
    outgoing = world.pages.outgoing(batch)
    outgoing.publish(range(LAYOUT.layers))
    outgoing.settle()
    for layer in range(LAYOUT.layers):
        expected = torch.zeros_like(world.mirror[layer])
        for page, row in ((9, 4), (3, 15), (4, 0)):
            expected[page, :, row] = world.device_bits(layer)[page, :, row]
        assert torch.equal(world.mirror[layer], expected)


def test_what_landed_is_there_for_what_is_computed_next(world: World) -> None:
    for layer, mirror in enumerate(world.mirror):
        mirror.copy_(
            torch.randint(-30000, 30000, mirror.shape, generator=torch.Generator().manual_seed(layer))
        )
    order = [(5 * i) % PAGES for i in range(PAGES)]
    world.pages.prepare("a", order, filled=PAGES - 3)
    seen = [
        layer.view(torch.int16) + 0 for layer in world.pages.layers
    ]  # computed without waiting for anything
    landed, rest = order[: PAGES - 3], order[PAGES - 3 :]
    for layer, mirror in zip(seen, world.mirror, strict=True):
        assert torch.equal(layer[landed].cpu(), mirror[landed])
        assert not bool(layer[rest].any())


def test_loads_and_stores_in_turn_through_one_ring(world: World) -> None:
    for turn in range(10):
        world.compute_all(turn)
        batch = step((0, 40, (turn, turn + 20, turn + 40)))
        outgoing = world.pages.outgoing(batch)
        for layer in range(LAYOUT.layers):
            outgoing.publish(range(layer, layer + 1))
        outgoing.settle()
        for layer in world.pages.layers:
            layer.zero_()
        world.pages.prepare(f"a{turn}", batch.spans[0].pages, filled=3)
        for layer, mirror in zip(world.pages.layers, world.mirror, strict=True):
            pages = list(batch.spans[0].pages)
            assert torch.equal(layer[pages].view(torch.int16).cpu(), mirror[pages])
            assert bool(mirror[pages].any())
