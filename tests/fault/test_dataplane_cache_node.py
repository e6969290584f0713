"""The cache node as users run it: a process on a real bus, killed and restarted."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.io.bus import Bus
from shared.io.nats_bus import connect
from shared.protocol import subjects
from shared.protocol.cluster import BlockEvents, BlockSnapshotPart, SnapshotAsked
from shared.protocol.errors import Refused
from shared.protocol.ids import NodeRef
from tests.support.fakes.endpoints import HOSTS, LAYOUT, NAMESPACE, Site, eventually, site
from tests.support.processes.cluster import Cluster, cluster
from tsukimi.replay import replay

KEYS = [bytes([i]) * 16 for i in range(40)]
LAYERS = range(LAYOUT.layers)
POOL_BLOCKS = 32
FIELDS = {"pool_bytes": POOL_BLOCKS * LAYOUT.block_bytes + 100, "put_lease_s": 1.0, "host": HOSTS["shm"]}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of one cache node."""
    fields = {"cache": FIELDS}
    with cluster(tmp_path, gateway=0, conductor=0, prefill=0, decode=0, cache=1, fields=fields) as c:  # type: ignore[arg-type]
        yield c


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_recorded_life_replays_to_the_same_commands(tmp_path: Path) -> None:
    fields = {"cache": {**FIELDS, "record": str(tmp_path / "record")}}
    with cluster(tmp_path, gateway=0, conductor=0, prefill=0, decode=0, cache=1, fields=fields) as c:  # type: ignore[arg-type]
        async with site("p", "tcp") as node:
            for first in (0, 10, 20, 25):
                await put(node, ref_of(c), KEYS[first : first + 15])
                await node.endpoint.fetch(ref_of(c), NAMESPACE, KEYS[first : first + 15], range(15))
            dying = await node.endpoint.open_put(ref_of(c), NAMESPACE, [b"x" * 16])
            dying.write(0, [(0, 0)])
            await eventually(lambda: c.loads["cache-0"].counters.get("puts_expired") == 1)
        c.term("cache-0")
    result = replay(tmp_path / "record")
    assert result.difference is None
    assert result.machine == "CacheMachine"
    assert result.commands > 15


def ref_of(c: Cluster) -> NodeRef:
    return c.infos["cache-0"].ref


async def put(writer: Site, target: NodeRef, keys: list[bytes]) -> int:
    stream = await writer.endpoint.open_put(target, NAMESPACE, keys)
    for layer in LAYERS:
        stream.write(layer, [(i, i % writer.arena.pages) for i in range(len(keys))])
    return (await stream.commit(len(keys))).stored


class Blocks:
    """The node's blocks, according to its messages on the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.events: list[BlockEvents] = []
        self.parts: list[BlockSnapshotPart] = []

    async def listen(self) -> None:
        await self._bus.subscribe_ordered(
            subjects.blocks("cache-0"), BlockEvents | BlockSnapshotPart, self._on
        )
        await self._bus.flush()

    async def snapshot(self) -> set[bytes]:
        """Ask for a snapshot and return all its keys."""
        self.parts = []
        await self._bus.publish(subjects.snapshot("cache-0"), SnapshotAsked("test"))
        await eventually(lambda: bool(self.parts) and len(self.parts) == self.parts[0].parts)
        return {key for part in self.parts for key in part.keys}

    def _on(self, message: BlockEvents | BlockSnapshotPart) -> None:
        if isinstance(message, BlockEvents):
            self.events.append(message)
        else:
            self.parts.append(message)


async def test_blocks_are_kept_published_evicted_and_served(one: Cluster, transport: str) -> None:
    bus = await connect(one.nats.url, name="test")
    blocks = Blocks(bus)
    await blocks.listen()
    async with site("p", transport) as writer, site("q", transport) as reader:
        contents = [writer.fill(page) for page in range(16)]
        assert await put(writer, ref_of(one), KEYS[:10]) == 10
        assert writer.endpoint.transports() == {"cache-0": transport}
        await eventually(lambda: bool(blocks.events))
        assert blocks.events[0].stored == tuple(KEYS[:10])
        fetched = await reader.endpoint.fetch(ref_of(one), NAMESPACE, KEYS[:11], list(range(11)))
        assert (fetched.blocks, fetched.error) == (10, "")
        assert [reader.read(page) for page in range(10)] == contents[:10]
        await put(writer, ref_of(one), KEYS[10:26])
        await put(writer, ref_of(one), KEYS[26:40])
        held: set[bytes] = set()
        await eventually(lambda: sum(len(event.stored) for event in blocks.events) == 40)
        for event in blocks.events:
            held = (held | set(event.stored)) - set(event.removed)
        assert len(held) == POOL_BLOCKS
        assert [event.seq for event in blocks.events] == list(range(1, len(blocks.events) + 1))
        assert await blocks.snapshot() == held
        assert blocks.parts[0].seq == blocks.events[-1].seq
        await eventually(lambda: one.loads["cache-0"].kv_blocks_cached == POOL_BLOCKS)
        assert one.loads["cache-0"].kv_blocks_held == 0
        assert one.loads["cache-0"].block_events_seq == blocks.events[-1].seq
        assert one.infos["cache-0"].kv_blocks == POOL_BLOCKS
    await bus.close()


async def test_the_first_layout_stays_and_others_are_refused_loudly(one: Cluster) -> None:
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16", dtype_bytes=2)
    async with site("p", "tcp") as writer, site("q", "tcp", layout=other) as foreign:
        assert await put(writer, ref_of(one), KEYS[:1]) == 1
        with pytest.raises(Refused, match=r"q has .*bfloat16.* cache-0 has .*float32"):
            await foreign.endpoint.open_put(ref_of(one), NAMESPACE, KEYS[:1])
        assert (await foreign.endpoint.fetch(ref_of(one), NAMESPACE, KEYS[:1], [0])).blocks == 0


async def test_a_writer_that_hangs_loses_its_put_to_the_next(one: Cluster, transport: str) -> None:
    async with site("p", transport) as hanging, site("q", transport) as next_one:
        stream = await hanging.endpoint.open_put(ref_of(one), NAMESPACE, KEYS[:4])
        stream.write(0, [(0, 0)])
        assert (await next_one.endpoint.open_put(ref_of(one), NAMESPACE, KEYS[:4])).wanted == frozenset()
        await eventually(lambda: one.loads["cache-0"].counters.get("puts_expired") == 1)
        assert await put(next_one, ref_of(one), KEYS[:4]) == 4
        assert (await stream.commit(4)).stored == 0
        await eventually(lambda: one.loads["cache-0"].kv_blocks_held == 0)


async def test_a_writer_that_dies_gives_its_room_back_at_once(one: Cluster, transport: str) -> None:
    async with site("p", transport) as dying:
        await dying.endpoint.open_put(ref_of(one), NAMESPACE, KEYS[:4])
        await eventually(lambda: one.loads["cache-0"].kv_blocks_held == 4)
    await eventually(lambda: one.loads["cache-0"].kv_blocks_held == 0)
    assert one.loads["cache-0"].counters["puts_aborted"] == 1


async def test_many_writers_and_readers_at_once_in_a_small_pool(one: Cluster, transport: str) -> None:
    """Every fetched block is what was put under its key, even while blocks are being evicted."""
    rounds = 12

    async def work(n: int) -> int:
        got = 0
        async with site(f"w{n}", transport, pages=20) as me:
            for round_ in range(rounds):
                keys = [bytes([(n + round_) % 4, i]) * 8 for i in range(10)]
                for i, key in enumerate(keys):
                    for layer in LAYERS:
                        me.arena.slice(i, layer)[:] = key * (LAYOUT.slice_bytes // 16)
                await put(me, ref_of(one), keys)
                wanted = [bytes([(n + round_ + 1) % 4, i]) * 8 for i in range(10)]
                result = await me.endpoint.fetch(ref_of(one), NAMESPACE, wanted, range(10, 20))
                for i in range(result.blocks):
                    assert me.read(10 + i) == wanted[i] * (LAYOUT.block_bytes // 16)
                got += result.blocks
        return got

    assert sum(await asyncio.gather(*(work(n) for n in range(4)))) > 0
    await eventually(lambda: one.loads["cache-0"].kv_blocks_held == 0)


async def test_kill_9_and_restart_twenty_times_leaves_nothing_and_an_empty_pool(
    one: Cluster,
) -> None:
    def shared_files() -> set[str]:
        return set(os.listdir("/dev/shm"))

    before, lives = shared_files(), set()
    async with site("p", "shm") as writer:
        for _ in range(20):
            ref = ref_of(one)
            lives.add(ref.incarnation)
            assert (await writer.endpoint.fetch(ref, NAMESPACE, KEYS[:4], list(range(4)))).blocks == 0
            assert await put(writer, ref, KEYS[:4]) == 4
            one.restart("cache-0", kill=True)
            one.wait_ready("cache-0")
    assert len(lives) == 20
    assert not {name for name in shared_files() - before if "tsukimi" in name}
    assert threading.active_count() < 20
