"""A reader waits at the cache for blocks that another node is still writing. Real endpoints, the cache node's backend."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from services.cache_node.pool_backend import MachineBackend
from shared.core.cache.config import CacheConfig
from shared.core.cache.machine import CacheEvent, CacheMachine
from shared.dataplane.transports.base import Timeouts
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, Site, eventually, site

KEYS = [bytes([i]) * 16 for i in range(4)]
LONG_S = 60.0
"""Nobody waits that long here: whoever is answered was answered because of the blocks."""
STALL_S = 0.2


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(cache: Site) -> CacheMachine:
    machine = CacheMachine(CacheConfig(pages=cache.arena.pages))

    def feed(event: CacheEvent) -> None:
        for command in machine.handle(event, time.monotonic()):
            answer: Any = command
            if type(answer).__name__ in ("GrantPut", "ConfirmPut", "GrantRead"):
                backend.answer(answer)

    backend = MachineBackend(feed, machine.holds)
    cache.endpoint.serve_pool(backend)
    return machine


async def put(near: Site, far: Site, pages: list[int]) -> int:
    stream = await near.endpoint.open_put(far.endpoint.ref, NAMESPACE, KEYS[: len(pages)])
    for layer in range(LAYOUT.layers):
        stream.write(layer, [(i, page) for i, page in enumerate(pages) if i in stream.wanted])
    return (await stream.commit(len(pages))).stored


async def test_blocks_come_as_soon_as_they_are_written(transport: str) -> None:
    async with site("p", transport) as writer, site("q", transport) as reader, site("c", transport) as cache:
        machine = serve(cache)
        content = [writer.fill(page) for page in (0, 1, 2)]
        fetch = asyncio.create_task(
            reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:3], [8, 9, 10], LONG_S)
        )
        assert await put(writer, cache, [0]) == 1
        await asyncio.sleep(0.05)
        assert not fetch.done(), "it came back with a part of what it waits for"
        assert await put(writer, cache, [0, 1, 2]) == 2
        result = await fetch
        assert (result.blocks, result.error) == (3, "")
        assert [reader.read(page) for page in (8, 9, 10)] == content
        await eventually(lambda: not machine.pool.held, "the lease is given back")


async def test_the_wait_is_told_apart_from_the_transfer(transport: str) -> None:
    """Bandwidth is learnt from fetches."""
    async with site("p", transport) as writer, site("c", transport) as cache:
        serve(cache)
        writer.fill(0)
        began = time.monotonic()
        fetch = asyncio.create_task(
            writer.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8], LONG_S)
        )
        await asyncio.sleep(0.3)
        await put(writer, cache, [0])
        waited_s = (await fetch).waited_s
        assert 0.2 < waited_s <= time.monotonic() - began
        again = await writer.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8], LONG_S)
        assert (again.blocks, again.waited_s < 0.2) == (1, True)


async def test_what_is_missing_when_patience_ends_is_an_ordinary_miss(transport: str) -> None:
    async with site("p", transport) as near, site("c", transport) as cache:
        serve(cache)
        near.fill(0)
        await put(near, cache, [0])
        result = await near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS, [8, 9, 10, 11], 0.05)
        assert (result.blocks, result.error) == (1, "")
        none = await near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[1:], [9, 10, 11], 0.05)
        assert (none.blocks, none.error) == (0, "the pool holds none of it")


async def test_without_patience_nobody_waits(transport: str) -> None:
    async with site("p", transport) as near, site("c", transport) as cache:
        serve(cache)
        result = await asyncio.wait_for(
            near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8]), LONG_S / 2
        )
        assert (result.blocks, result.error) == (0, "the pool holds none of it")


async def test_other_reads_on_the_connection_go_on_meanwhile(transport: str) -> None:
    async with site("p", transport) as near, site("c", transport) as cache:
        serve(cache)
        block = near.fill(0)
        await put(near, cache, [0])
        waiting = asyncio.create_task(
            near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:2], [8, 9], LONG_S)
        )
        await asyncio.sleep(0.05)
        for _ in range(3):
            other = await near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [10])
            assert (other.blocks, near.read(10) == block) == (1, True)
        assert not waiting.done()
        near.fill(1)
        assert await put(near, cache, [0, 1]) == 1
        assert (await waiting).blocks == 2


async def test_a_silent_wait_is_not_taken_for_a_stalled_connection(transport: str) -> None:
    quick = Timeouts(connect_s=2.0, stall_s=STALL_S)
    async with (
        site("p", transport, timeouts=quick) as reader,
        site("q", transport) as writer,
        site("c", transport) as cache,
    ):
        serve(cache)
        fetch = asyncio.create_task(
            reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8], LONG_S)
        )
        await asyncio.sleep(4 * STALL_S)
        writer.fill(0)
        await put(writer, cache, [0])
        result = await fetch
        assert (result.blocks, result.error) == (1, "")


async def test_a_cache_that_dies_ends_the_wait(transport: str) -> None:
    async with site("p", transport) as near:
        async with site("c", transport) as cache:
            serve(cache)
            fetch = asyncio.create_task(
                near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8], LONG_S)
            )
            await asyncio.sleep(0.05)
            assert not fetch.done()
        result = await asyncio.wait_for(fetch, LONG_S / 2)
        assert result.blocks == 0
        assert result.error


async def test_a_reader_that_leaves_pins_nothing(transport: str) -> None:
    async with site("p", transport) as writer, site("c", transport) as cache:
        machine = serve(cache)
        async with site("q", transport) as reader:
            fetch = asyncio.create_task(
                reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8], LONG_S)
            )
            await asyncio.sleep(0.05)
            fetch.cancel()
            await asyncio.wait({fetch})
        writer.fill(0)
        await put(writer, cache, [0])
        await eventually(lambda: machine.counters["reads"] == 1 and not machine.pool.held, "it is given back")


@pytest.mark.parametrize("patience_s", [float("nan"), -1.0])
async def test_patience_that_is_no_time_is_none(transport: str, patience_s: float) -> None:
    async with site("p", transport) as near, site("c", transport) as cache:
        serve(cache)
        result = await asyncio.wait_for(
            near.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:1], [8], patience_s), LONG_S / 2
        )
        assert result.blocks == 0
