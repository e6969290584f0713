"""Slices lost, damaged or delayed on the way, and pages that get a new owner during a transfer."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.dataplane.api import LandingCommit
from shared.dataplane.faults import Fault, Faults
from shared.dataplane.memory.arena import Arena
from shared.dataplane.transports.base import PeerLost
from shared.dataplane.transports.tcp import TcpTransport
from shared.dataplane.wire.frames import Hello, OpenWrite, Write
from shared.dataplane.wire.framing import encode
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, TIMEOUTS, DictPool, Site, eventually, site

LANDING = b"L" * 16
LAYERS = range(LAYOUT.layers)
KEYS = [bytes([i]) * 16 for i in range(8)]


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def nth(which: int, fault: Fault) -> Faults:
    """Apply the fault to slice number `which` only."""
    return lambda n: fault if n == which else None


async def hand_over(near: Site, far: Site, blocks: int) -> tuple[LandingCommit, str]:
    """Write `blocks` blocks. Returns what the receiver and the writer were told."""
    told: asyncio.Future[LandingCommit] = asyncio.get_running_loop().create_future()
    far.endpoint.open_landing(LANDING, range(blocks), told.set_result)
    stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
    for layer in LAYERS:
        stream.write(layer, [(block, block) for block in range(blocks)])
    reply = await stream.commit(blocks)
    assert not reply.ok
    return await asyncio.wait_for(told, 10), reply.error


@pytest.mark.parametrize("which", [0, 5, 11])
async def test_a_lost_slice_is_never_taken_for_a_whole_block(transport: str, which: int) -> None:
    async with site("p", transport) as near, site("d", transport, faults=nth(which, Fault(drop=True))) as far:
        commit, error = await hand_over(near, far, 4)
        assert not commit.ok
        assert commit.error == error == f"block {which % 4} is missing layer {which // 4}"


@pytest.mark.parametrize("which", [0, 5, 11])
async def test_a_corrupt_slice_is_named_and_not_decoded_on(transport: str, which: int) -> None:
    faults = nth(which, Fault(corrupt=True))
    async with site("p", transport) as near, site("d", transport, faults=faults) as far:
        for page in range(4):
            near.fill(page)
        commit, error = await hand_over(near, far, 4)
        assert not commit.ok
        assert commit.error == error == f"block {which % 4} is corrupt in layer {which // 4}"
        assert far.endpoint.counters()["blocks_corrupt"] == 1


async def test_a_corrupt_slice_that_is_sent_again_is_healed(transport: str) -> None:
    told: list[LandingCommit] = []
    faults = nth(1, Fault(corrupt=True))
    async with site("p", transport) as near, site("d", transport, faults=faults) as far:
        block = near.fill(0)
        far.endpoint.open_landing(LANDING, [3], told.append)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        for layer in (0, 1, 1, 2):
            stream.write(layer, [(0, 0)])
        assert (await stream.commit(1)).ok
        assert far.read(3) == block


async def test_a_connection_cut_in_a_transfer_fails_the_landing_and_the_stream(transport: str) -> None:
    faults = nth(6, Fault(cut=True))
    async with site("p", transport) as near, site("d", transport, faults=faults) as far:
        commit, error = await hand_over(near, far, 4)
        assert not commit.ok
        assert "the writer was lost" in commit.error
        assert error
        again = near.endpoint.open_write(far.endpoint.ref, LANDING)
        assert "not open here" in (await again.commit(0)).error


@pytest.mark.parametrize(("fault", "word"), [(Fault(drop=True), "missing"), (Fault(corrupt=True), "corrupt")])
async def test_a_fetch_ends_before_the_first_bad_block(transport: str, fault: Fault, word: str) -> None:
    which = 2 * LAYOUT.layers + 1
    async with (
        site("p", transport) as writer,
        site("cache", transport, order="page") as cache,
        site("q", transport, faults=nth(which, fault)) as reader,
    ):
        cache.endpoint.serve_pool(DictPool(16))
        blocks = [writer.fill(page) for page in range(5)]
        await put(writer, cache, 5)
        result = await reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:5], range(5))
        assert result.blocks == 2
        assert f"block 2 is {word}" in result.error
        assert [reader.read(page) for page in range(2)] == blocks[:2]


async def test_a_fetch_cut_in_the_middle_keeps_what_was_verified(transport: str) -> None:
    async with (
        site("p", transport) as writer,
        site("cache", transport, order="page") as cache,
        site("q", transport, faults=nth(4, Fault(cut=True))) as reader,
    ):
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        await put(writer, cache, 5)
        result = await reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:5], range(5))
        assert (result.blocks, result.error) == (0, "cut on purpose")
        await eventually(lambda: not pool.leases, "the lease of the lost reader is given back")


async def test_pages_that_change_under_a_read_are_a_miss(transport: str) -> None:
    """If a lease ends before the reader is done, the pages may get other contents."""
    async with (
        site("p", transport) as writer,
        site("cache", transport, order="page") as cache,
        site("q", transport) as reader,
    ):
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        await put(writer, cache, 5)
        cache.fill(pool.held[(NAMESPACE, KEYS[3])][0])
        result = await reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:5], range(5))
        assert (result.blocks, result.error) == (3, "block 3 is corrupt")


async def test_a_corrupt_block_is_not_stored_in_the_pool(transport: str) -> None:
    faults = nth(LAYOUT.layers, Fault(corrupt=True))
    async with site("p", transport) as writer, site("cache", transport, faults=faults) as cache:
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        stream = await writer.endpoint.open_put(cache.endpoint.ref, NAMESPACE, KEYS[:3])
        for block in range(3):
            for layer in LAYERS:
                stream.write(layer, [(block, block)])
        reply = await stream.commit(3)
        assert (reply.ok, reply.stored, reply.error) == (False, 2, "block 1 is corrupt in layer 0")
        assert {key for _, key in pool.held} == {KEYS[0], KEYS[2]}


async def test_a_slow_writer_never_writes_into_the_new_owners_pages(transport: str) -> None:
    """Landings are closed at random times during a transfer, and their pages get a new owner at once."""
    rng = random.Random(1)
    slow: Faults = lambda n: Fault(delay_s=0.002) if n % 7 == 0 else None  # noqa: E731
    async with site("p", transport) as near, site("d", transport, faults=slow) as far:
        for round_ in range(25):
            landing = round_.to_bytes(16, "big")
            near.fill(0)
            far.endpoint.open_landing(landing, [1, 2, 3], lambda commit: None)
            stream = near.endpoint.open_write(far.endpoint.ref, landing)
            for _ in range(4):
                for layer in LAYERS:
                    stream.write(layer, [(0, 0), (1, 0), (2, 0)])
            await asyncio.sleep(rng.random() * 0.02)
            await far.endpoint.close_landing(landing)
            owned = [far.fill(page) for page in (1, 2, 3)]
            reply = await stream.commit(3)
            assert not reply.ok
            assert [far.read(page) for page in (1, 2, 3)] == owned


async def test_a_writer_stuck_in_the_middle_of_a_slice_is_cut_off() -> None:
    told: list[LandingCommit] = []
    async with site("d", "tcp") as far:
        far.endpoint.open_landing(LANDING, [0], told.append)
        writer = Arena(LAYOUT, 1)
        connection = TcpTransport(writer.memory, TIMEOUTS).connect(far.endpoint.ref.tcp)
        ref = far.endpoint.ref
        connection.send(Hello("p", "1", ref.node, ref.incarnation, LAYOUT))
        await asyncio.to_thread(connection.receive)
        connection.send(OpenWrite(1, LANDING))
        head = encode(Write(1, 0, [0], [0]), LAYOUT.slice_bytes)
        connection._sock.sendall(head + b"x" * (LAYOUT.slice_bytes // 2))
        await eventually(lambda: far.arena.slice(0, 0)[0] == ord("x"), "half a slice has arrived")
        await far.endpoint.close_landing(LANDING)
        mine = far.fill(0)
        with pytest.raises(PeerLost):
            await asyncio.to_thread(connection.receive)
        assert far.read(0) == mine
        assert told == []
        connection.close()
        writer.close()


async def test_a_fetch_that_is_cancelled_leaves_its_pages_alone(transport: str) -> None:
    slow: Faults = lambda n: Fault(delay_s=0.02)  # noqa: E731
    async with (
        site("p", transport) as writer,
        site("cache", transport, order="page") as cache,
        site("q", transport, faults=slow) as reader,
    ):
        pool = DictPool(16)
        cache.endpoint.serve_pool(pool)
        await put(writer, cache, 5)
        fetch = asyncio.create_task(reader.endpoint.fetch(cache.endpoint.ref, NAMESPACE, KEYS[:5], range(5)))
        await eventually(lambda: reader.endpoint.counters()["slices_received"] > 0)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        mine = [reader.fill(page) for page in range(5)]
        await eventually(lambda: not pool.leases)
        assert [reader.read(page) for page in range(5)] == mine


async def put(writer: Site, cache: Site, blocks: int) -> None:
    stream = await writer.endpoint.open_put(cache.endpoint.ref, NAMESPACE, KEYS[:blocks])
    for layer in LAYERS:
        stream.write(layer, [(i, i) for i in range(blocks)])
    reply = await stream.commit(blocks)
    assert (reply.ok, reply.stored) == (True, blocks)
