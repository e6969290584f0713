"""What a DataPlane guarantees on each transport: landings, write streams, puts, fetches."""

from __future__ import annotations

import asyncio
import os
import threading

import msgspec
import pytest

from shared.dataplane.api import DataPlane, LandingCommit, LandingStats
from shared.protocol.errors import Refused, Unavailable
from shared.protocol.ids import NodeRef
from shared.protocol.model import KVLayout
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, DictPool, Site, eventually, site

LANDING = b"L" * 16
LAYERS = range(LAYOUT.layers)
KEYS = [bytes([i]) * 16 for i in range(8)]


@pytest.fixture(params=["tcp", "shm", "unix"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Commits:
    """Records the calls of on_commit."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[LandingCommit] = asyncio.Queue()

    async def next(self) -> LandingCommit:
        return await asyncio.wait_for(self.queue.get(), 10)

    def none_left(self) -> bool:
        return self.queue.empty()


async def store(writer: Site, pool: NodeRef, keys: list[bytes], pages: list[int]) -> int:
    put = await writer.endpoint.open_put(pool, NAMESPACE, keys)
    for layer in LAYERS:
        put.write(layer, list(enumerate(pages)))
    reply = await put.commit(len(keys))
    assert reply.ok
    return reply.stored


async def test_a_prompt_lands_layer_by_layer(transport: str) -> None:
    commits = Commits()
    stats: list[LandingStats | None] = []
    async with site("prefill-0", transport) as near, site("decode-0", transport) as far:
        plane: DataPlane = near.endpoint
        blocks = [near.fill(page) for page in (3, 1, 7)]

        def on_commit(commit: LandingCommit) -> None:
            stats.append(far.endpoint.landing_stats(LANDING))
            commits.queue.put_nowait(commit)

        far.endpoint.open_landing(LANDING, [9, 4, 2], on_commit)
        stream = plane.open_write(far.endpoint.ref, LANDING)
        for layer in LAYERS:
            stream.write(layer, [(0, 3), (1, 1)])
            stream.write(layer, [(2, 7)])
        reply = await stream.commit(3, b"first token")
        assert reply.ok, reply.error
        assert await commits.next() == LandingCommit(LANDING, True, b"first token")
        assert [far.read(page) for page in (9, 4, 2)] == blocks
        assert near.endpoint.transports() == {"decode-0": transport}
        assert stats[0] is not None
        assert (stats[0].slices, stats[0].bytes) == (9, 3 * LAYOUT.block_bytes)
        sent, received = near.endpoint.counters(), far.endpoint.counters()
        assert sent["bytes_sent"] == received["bytes_received"] == 3 * LAYOUT.block_bytes
        assert sent["slices_sent"] == received["slices_received"] == 9
        assert received["slices_corrupt"] == received["stale_writes_refused"] == 0


async def test_slices_may_come_in_any_order_and_twice(transport: str) -> None:
    commits = Commits()
    async with site("p", transport) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, [0, 1], commits.queue.put_nowait)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        near.fill(5)
        stream.write(1, [(1, 5), (0, 5)])
        blocks = [near.fill(page) for page in (2, 6)]
        for layer in reversed(LAYERS):
            stream.write(layer, [(1, 6)])
            stream.write(layer, [(0, 2), (1, 6)])
        assert (await stream.commit(2)).ok
        assert (await commits.next()).ok
        assert [far.read(page) for page in (0, 1)] == blocks


async def test_a_missing_slice_is_named(transport: str) -> None:
    commits = Commits()
    async with site("p", transport) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, [0, 1], commits.queue.put_nowait)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        for layer in (0, 2):
            stream.write(layer, [(0, 0), (1, 1)])
        stream.write(1, [(0, 0)])
        reply = await stream.commit(2)
        assert (reply.ok, reply.error) == (False, "block 1 is missing layer 1")
        assert await commits.next() == LandingCommit(LANDING, False, b"", "block 1 is missing layer 1")


async def test_more_blocks_than_room_is_not_ok(transport: str) -> None:
    commits = Commits()
    async with site("p", transport) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, [0], commits.queue.put_nowait)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        for layer in LAYERS:
            stream.write(layer, [(0, 0)])
        assert not (await stream.commit(2)).ok
        assert not (await commits.next()).ok


async def test_an_unknown_landing_is_refused(transport: str) -> None:
    async with site("p", transport) as near, site("d", transport) as far:
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        for layer in LAYERS:
            stream.write(layer, [(0, 0)])
        reply = await stream.commit(1)
        assert not reply.ok
        assert "is not open here" in reply.error


async def test_a_landing_has_one_writer_ever(transport: str) -> None:
    commits = Commits()
    async with (
        site("p", transport) as first,
        site("q", transport) as second,
        site("d", transport) as far,
    ):
        far.endpoint.open_landing(LANDING, [0], commits.queue.put_nowait)
        block = first.fill(0)
        second.fill(0)
        one = first.endpoint.open_write(far.endpoint.ref, LANDING)
        one.write(0, [(0, 0)])
        await eventually(lambda: far.endpoint.counters()["slices_received"] == 1)
        two = second.endpoint.open_write(far.endpoint.ref, LANDING)
        for layer in LAYERS:
            two.write(layer, [(0, 0)])
        refused = await two.commit(1)
        assert "another writer" in refused.error
        for layer in LAYERS:
            one.write(layer, [(0, 0)])
        assert (await one.commit(1)).ok
        assert far.read(0) == block
        far.endpoint.open_landing(b"M" * 16, [1], commits.queue.put_nowait)
        with pytest.raises(ValueError, match="open already"):
            far.endpoint.open_landing(b"M" * 16, [2], commits.queue.put_nowait)


async def test_a_writer_that_gives_up_fails_the_landing(transport: str) -> None:
    commits = Commits()
    async with site("p", transport) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, [0], commits.queue.put_nowait)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        stream.write(0, [(0, 0)])
        await stream.abort()
        await stream.abort()
        assert "gave up" in (await commits.next()).error
        assert not (await stream.commit(1)).ok
        assert commits.none_left()


async def test_a_closed_landing_tells_nobody_and_refuses_what_comes(transport: str) -> None:
    commits = Commits()
    async with site("p", transport) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, [0], commits.queue.put_nowait)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        stream.write(0, [(0, 0)])
        await eventually(lambda: far.endpoint.counters()["slices_received"] == 1)
        await far.endpoint.close_landing(LANDING)
        await far.endpoint.close_landing(LANDING)
        before = far.fill(0)
        near.fill(0)
        stream.write(1, [(0, 0)])
        stream.write(2, [(0, 0)])
        reply = await stream.commit(1)
        assert (reply.ok, reply.error) == (False, "the landing was closed")
        assert far.read(0) == before
        assert far.endpoint.counters()["stale_writes_refused"] >= 1
        assert commits.none_left()


async def test_landings_of_one_peer_do_not_disturb_each_other(transport: str) -> None:
    commits = Commits()
    count = 12
    async with site("p", transport, pages=count) as near, site("d", transport, pages=count) as far:
        blocks = [near.fill(page) for page in range(count)]
        landings = [bytes([i]) * 16 for i in range(count)]
        for i, landing in enumerate(landings):
            far.endpoint.open_landing(landing, [count - 1 - i], commits.queue.put_nowait)
        streams = [near.endpoint.open_write(far.endpoint.ref, landing) for landing in landings]
        for layer in LAYERS:
            for i, stream in enumerate(streams):
                stream.write(layer, [(0, i)])
        replies = await asyncio.gather(*(stream.commit(1) for stream in streams))
        assert all(reply.ok for reply in replies)
        assert {(await commits.next()).landing for _ in landings} == set(landings)
        assert [far.read(count - 1 - i) for i in range(count)] == blocks
        assert near.endpoint.counters()["connections_opened"] == 1


async def test_blocks_put_by_one_node_are_fetched_by_another(transport: str) -> None:
    async with (
        site("p", transport) as writer,
        site("cache", transport, order="page") as cache,
        site("q", transport) as reader,
    ):
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        blocks = [writer.fill(page) for page in range(5)]
        assert await store(writer, cache.endpoint.ref, KEYS[:5], [0, 1, 2, 3, 4]) == 5
        result = await reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:6], [9, 7, 8, 1, 2, 3])
        assert (result.blocks, result.bytes, result.error) == (5, 5 * LAYOUT.block_bytes, "")
        assert [reader.read(page) for page in (9, 7, 8, 1, 2)] == blocks
        await eventually(lambda: not pool.leases)
        other = await reader.endpoint.fetch(cache.endpoint.ref, b"other", KEYS[:1], [0])
        assert (other.blocks, other.error) == (0, "the pool holds none of it")


async def test_only_what_the_pool_lacks_is_sent(transport: str) -> None:
    async with site("p", transport) as writer, site("cache", transport, order="page") as cache:
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        await store(writer, cache.endpoint.ref, KEYS[:2], [0, 1])
        put = await writer.endpoint.open_put(cache.endpoint.ref, NAMESPACE, KEYS[:3])
        assert put.wanted == {2}
        before = writer.endpoint.counters()["bytes_sent"]
        for layer in LAYERS:
            put.write(layer, [(0, 0), (1, 1), (2, 2)])
        assert (await put.commit(3)).stored == 1
        assert writer.endpoint.counters()["bytes_sent"] - before == LAYOUT.block_bytes
        nothing = await writer.endpoint.open_put(cache.endpoint.ref, NAMESPACE, KEYS[:3])
        assert nothing.wanted == frozenset()
        nothing.write(0, [(0, 0)])
        reply = await nothing.commit(3)
        assert (reply.ok, reply.stored) == (True, 0)


async def test_a_put_publishes_only_what_it_vouches_for(transport: str) -> None:
    async with site("p", transport) as writer, site("cache", transport, order="page") as cache:
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        put = await writer.endpoint.open_put(cache.endpoint.ref, NAMESPACE, KEYS[:4])
        for layer in LAYERS:
            put.write(layer, [(0, 0), (1, 1), (3, 3)] if layer else [(0, 0), (3, 3)])
        reply = await put.commit(3)
        assert (reply.ok, reply.stored) == (False, 1)
        assert reply.error == "block 1 is missing layer 0"
        assert set(pool.held) == {(NAMESPACE, KEYS[0])}
        assert len(pool.free) == 15


async def test_an_aborted_put_gives_its_pages_back(transport: str) -> None:
    async with site("p", transport) as writer, site("cache", transport, order="page") as cache:
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        put = await writer.endpoint.open_put(cache.endpoint.ref, NAMESPACE, KEYS[:4])
        put.write(0, [(0, 0)])
        await put.abort()
        await eventually(lambda: len(pool.free) == 16)
        assert not pool.held


async def test_a_node_without_a_pool_says_so(transport: str) -> None:
    async with site("p", transport) as near, site("d", transport) as far:
        with pytest.raises(Unavailable, match="serves no pool"):
            await near.endpoint.open_put(far.endpoint.ref, NAMESPACE, KEYS[:1])
        result = await near.endpoint.fetch(far.endpoint.ref, NAMESPACE, KEYS[:1], [0])
        assert (result.blocks, result.error) == (0, "this node serves no pool")


async def test_nobody_there_is_an_answer_not_an_exception(transport: str) -> None:
    async with site("p", transport) as near:
        async with site("gone", transport) as far:
            ref = far.endpoint.ref
        stream = near.endpoint.open_write(ref, LANDING)
        stream.write(0, [(0, 0)])
        reply = await stream.commit(1)
        assert not reply.ok
        assert "gone cannot be reached" in reply.error
        await near.endpoint.open_write(ref, LANDING).abort()
        result = await near.endpoint.fetch(ref, NAMESPACE, KEYS[:1], [0])
        assert result.blocks == 0
        with pytest.raises(Unavailable, match="gone"):
            await near.endpoint.open_put(ref, NAMESPACE, KEYS[:1])


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("layers", 4), ("block_tokens", 8), ("kv_heads", 1)]
)
async def test_another_layout_is_refused_naming_both(transport: str, field: str, value: object) -> None:
    other: KVLayout = msgspec.structs.replace(LAYOUT, **{field: value})
    async with site("p", transport, layout=other) as near, site("cache", transport) as far:
        far.endpoint.serve_pool(DictPool(4))
        with pytest.raises(Refused, match=r"p has \[.* cache has \["):
            await near.endpoint.open_put(far.endpoint.ref, NAMESPACE, KEYS[:1])
        reply = await near.endpoint.open_write(far.endpoint.ref, LANDING).commit(1)
        assert "KV layouts differ" in reply.error
        result = await near.endpoint.fetch(far.endpoint.ref, NAMESPACE, KEYS[:1], [0])
        assert "KV layouts differ" in result.error
        assert far.endpoint.counters()["connections_refused"] >= 2


async def test_kv_of_another_namespace_is_refused_naming_both(transport: str) -> None:
    mine, theirs = b"\x01" * 16, b"\x02" * 16
    async with (
        site("p", transport, namespace=mine) as near,
        site("d", transport, namespace=theirs) as far,
        site("cache", transport) as anyone,
    ):
        reply = await near.endpoint.open_write(far.endpoint.ref, LANDING).commit(1)
        assert mine.hex() in reply.error
        assert theirs.hex() in reply.error
        anyone.endpoint.serve_pool(DictPool(4))
        put = await near.endpoint.open_put(anyone.endpoint.ref, mine, KEYS[:1])
        await put.abort()


async def test_a_host_that_only_looks_the_same_is_reached_by_tcp() -> None:
    async with site("p", "shm") as near, site("d", "shm") as far:
        ref = msgspec.structs.replace(far.endpoint.ref, shm="nobody-listens-here")
        commits = Commits()
        far.endpoint.open_landing(LANDING, [0], commits.queue.put_nowait)
        stream = near.endpoint.open_write(ref, LANDING)
        for layer in LAYERS:
            stream.write(layer, [(0, 0)])
        assert (await stream.commit(1)).ok
        assert near.endpoint.transports() == {"d": "tcp"}


async def test_writes_from_a_thread_wait_while_the_queue_is_full(transport: str) -> None:
    commits = Commits()
    async with site("p", transport, queue_limit=2) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, list(range(16)), commits.queue.put_nowait)
        blocks = [near.fill(page) for page in range(16)]
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)

        def write_all() -> None:
            for layer in LAYERS:
                for i in range(16):
                    stream.write(layer, [(i, i)])

        await asyncio.to_thread(write_all)
        assert (await stream.commit(16)).ok
        assert [far.read(page) for page in range(16)] == blocks


async def test_closing_ends_every_thread_and_descriptor(transport: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with site("p", transport) as near, site("d", transport) as far:
        far.endpoint.open_landing(LANDING, [0], lambda commit: None)
        near.endpoint.open_write(far.endpoint.ref, LANDING).write(0, [(0, 0)])
        await near.endpoint.fetch(far.endpoint.ref, NAMESPACE, KEYS[:1], [1])
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("p-", "d-", "data-plane"))]
    assert len(os.listdir("/proc/self/fd")) <= before
