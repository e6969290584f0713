"""Tokens leave in the order made, one message per step and gateway; what can't be sent is dropped and counted."""

from __future__ import annotations

import asyncio

from shared.core.worker.events import SendTokens
from shared.io.memory_bus import MemoryBroker
from shared.io.token_feed import WAITING_LIMIT, TokenFeed
from shared.protocol import subjects
from shared.protocol.requests import TokenBatch, TokenDelta


async def test_batches_come_in_order_and_flushed_means_sent() -> None:
    broker = MemoryBroker()
    bus, ear = broker.connect(), broker.connect()
    heard: list[TokenBatch] = []
    await ear.subscribe_ordered(subjects.tokens("g"), TokenBatch, heard.append)
    feed = TokenFeed(bus, "n", "life")
    for index in range(5):
        feed.publish(SendTokens("g", (TokenDelta("a", index, (index,)),)))
    running = asyncio.create_task(feed.run())
    async with asyncio.timeout(10):
        await feed.flushed()
        while len(heard) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    assert [b.deltas[0].tokens for b in heard] == [(i,) for i in range(5)]
    assert {(b.node, b.incarnation) for b in heard} == {("n", "life")}


async def test_a_feed_nobody_empties_drops_and_counts() -> None:
    feed = TokenFeed(MemoryBroker().connect(), "n", "life")
    for index in range(WAITING_LIMIT + 3):
        feed.publish(SendTokens("g", (TokenDelta("a", index, (1,)),)))
    assert feed.dropped == 3
