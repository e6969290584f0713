"""A pool backend may take its time. Real endpoints; the example of a tier below memory."""

from __future__ import annotations

import asyncio

import pytest

from tests.examples.pool_tier import Block, TieredPool
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, DictPool, Site, eventually, site

KEYS = [bytes([i]) * 16 for i in range(4)]


class Tier:
    """A slow tier in this process. Reads wait while it is held."""

    def __init__(self) -> None:
        self.kept: dict[Block, bytes] = {}
        self.free = asyncio.Event()
        self.free.set()
        self.reads = 0

    async def read(self, block: Block) -> bytes | None:
        self.reads += 1
        await self.free.wait()
        return self.kept.get(block)

    def write(self, block: Block, content: bytes) -> None:
        self.kept[block] = content


async def put(near: Site, far: Site, pages: list[int]) -> None:
    stream = await near.endpoint.open_put(far.endpoint.ref, NAMESPACE, KEYS[: len(pages)])
    for layer in range(LAYOUT.layers):
        stream.write(layer, list(enumerate(pages)))
    assert (await stream.commit(len(pages))).ok


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_blocks_that_memory_lost_come_back_from_the_tier(transport: str) -> None:
    async with site("p", transport) as near, site("c", transport) as far:
        pool, tier = DictPool(4), Tier()
        far.endpoint.serve_pool(TieredPool(pool, far.arena, tier))
        content = [near.fill(page) for page in (0, 1, 2)]
        await put(near, far, [0, 1, 2])
        pool.free += [page for page, _ in pool.held.values()]
        pool.held.clear()
        result = await near.endpoint.fetch(far.endpoint.ref, NAMESPACE, KEYS, [8, 9, 10, 11])
        assert (result.blocks, result.error) == (3, "")
        assert [near.read(page) for page in (8, 9, 10)] == content
        await eventually(lambda: not pool.leases, "the lease is given back")


async def test_nobody_else_waits_for_a_slow_read() -> None:
    async with site("p", "tcp") as near, site("c", "tcp") as far:
        pool, tier = DictPool(8), Tier()
        far.endpoint.serve_pool(TieredPool(pool, far.arena, tier))
        near.fill(0)
        await put(near, far, [0])
        tier.free.clear()
        slow = asyncio.create_task(near.endpoint.fetch(far.endpoint.ref, NAMESPACE, KEYS[:1], [8]))
        await eventually(lambda: tier.reads == 1, "the read waits")
        far.endpoint.open_landing(b"L" * 16, [5], lambda commit: None)
        stream = near.endpoint.open_write(far.endpoint.ref, b"L" * 16)
        for layer in range(LAYOUT.layers):
            stream.write(layer, [(0, 0)])
        assert (await stream.commit(1)).ok
        other = await near.endpoint.open_put(far.endpoint.ref, NAMESPACE, [b"x" * 16])
        await other.abort()
        assert not slow.done()
        tier.free.set()
        assert (await slow).blocks == 1


async def test_a_grant_that_comes_too_late_is_given_back() -> None:
    async with site("c", "tcp") as far:
        pool, tier = DictPool(8), Tier()
        far.endpoint.serve_pool(TieredPool(pool, far.arena, tier))
        async with site("p", "tcp") as near:
            near.fill(0)
            await put(near, far, [0])
            tier.free.clear()
            slow = asyncio.create_task(near.endpoint.fetch(far.endpoint.ref, NAMESPACE, KEYS[:1], [8]))
            await eventually(lambda: tier.reads == 1, "the read waits")
        assert (await slow).blocks == 0
        await asyncio.sleep(0.1)
        tier.free.set()
        await eventually(lambda: pool.reads_granted == 1 and not pool.leases, "the grant is given back")
