"""Block events leave in the order decided, snapshots in parts; what can't be sent is dropped."""

from __future__ import annotations

import asyncio

from shared.core.kv.block_events import PublishBlocks, PublishSnapshot
from shared.io.block_feed import WAITING_LIMIT, BlockFeed
from shared.io.memory_bus import MemoryBroker
from shared.protocol import subjects
from shared.protocol.cluster import BlockEvents, BlockSnapshotPart

KEYS = tuple(i.to_bytes(16, "big") for i in range(200_000))


async def test_events_and_snapshots_come_in_order() -> None:
    broker = MemoryBroker()
    bus, ear = broker.connect(), broker.connect()
    heard: list[BlockEvents | BlockSnapshotPart] = []
    await ear.subscribe_ordered(subjects.blocks("n"), BlockEvents | BlockSnapshotPart, heard.append)
    feed = BlockFeed(bus, "n", "life")
    feed.publish(PublishBlocks(1, KEYS[:2], ()))
    feed.publish(PublishSnapshot(1, KEYS))
    feed.publish(PublishBlocks(2, (), KEYS[:1]))
    async with asyncio.timeout(10):
        running = asyncio.create_task(feed.run())
        while not heard or heard[-1].seq != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    first, *parts, last = heard
    assert first == BlockEvents("n", "life", 1, KEYS[:2])
    assert last == BlockEvents("n", "life", 2, (), KEYS[:1])
    assert all(isinstance(part, BlockSnapshotPart) for part in parts)
    assert len(parts) > 1
    assert tuple(key for part in parts if isinstance(part, BlockSnapshotPart) for key in part.keys) == KEYS


async def test_a_feed_nobody_empties_drops_and_counts() -> None:
    feed = BlockFeed(MemoryBroker().connect(), "n", "life")
    for seq in range(WAITING_LIMIT + 3):
        feed.publish(PublishBlocks(seq, (), ()))
    assert feed.dropped == 3
