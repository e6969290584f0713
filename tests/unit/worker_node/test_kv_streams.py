"""KVStreams of a worker, between real endpoints: what a step computes goes out layer by layer, what is owed in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from shared.core.worker.steps import RunStep, SequenceStep
from shared.core.worker.transfers import (
    AbortStreams,
    CommitHandoff,
    HandoffEnded,
    OpenHandoff,
    OpenPoolWrite,
    PoolWriteEnded,
    SendBlocks,
)
from shared.dataplane.api import LandingCommit
from shared.protocol.handoff import HandoffInfo
from shared.protocol.ids import NodeRef
from shared.protocol.requests import HandoffTarget
from shared.worker_node.kv_streams import KVStreams
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, DictPool, Site, eventually, site

LANDING = b"l" * 16
KEYS = tuple(bytes([i]) * 16 for i in range(4))
PAGES = (3, 5, 1, 7)
"""Of the writer; the receiver's are 0, 1, 2, 3."""


class Scene:
    def __init__(self, writer: Site, reader: Site, streams: KVStreams, pool: DictPool) -> None:
        self.writer = writer
        self.reader = reader
        self.streams = streams
        self.pool = pool
        self.content = {page: writer.fill(page) for page in PAGES}
        self.commits: list[LandingCommit] = []

    def open_handoff(self) -> None:
        self.reader.endpoint.open_landing(LANDING, range(4), self.commits.append)
        self.streams.open_handoff(OpenHandoff("a", HandoffTarget(self.reader.endpoint.ref, LANDING), PAGES))

    def open_put(self, ref: NodeRef | None = None) -> None:
        self.streams.open_pool_write(
            OpenPoolWrite("a", ref or self.reader.endpoint.ref, NAMESPACE, 0, KEYS, PAGES)
        )

    async def granted(self) -> None:
        """The pool has answered the put."""
        await self.streams._puts["a"].granted

    async def step(self, start: int, tokens: int) -> None:
        """A step of an engine: its layers come from another thread."""
        sequence = SequenceStep("a", start, tokens, b"", PAGES)
        on_layer = self.streams.layer_writer(RunStep(1, (sequence,)))
        assert on_layer is not None
        for layer in range(LAYOUT.layers):
            await asyncio.to_thread(on_layer, layer)

    def arrived(self, blocks: int) -> bool:
        return all(self.reader.read(b) == self.content[PAGES[b]] for b in range(blocks))


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with site("writer", "tcp") as writer, site("reader", "tcp") as reader, asyncio.TaskGroup() as tasks:
        pool = DictPool(16)
        reader.endpoint.serve_pool(pool)
        yield Scene(
            writer, reader, KVStreams(writer.endpoint, LAYOUT.layers, LAYOUT.block_tokens, tasks), pool
        )


async def test_steps_stream_what_they_touch_and_the_commit_carries_the_first_token() -> None:
    async with scene() as s:
        s.open_handoff()
        await s.step(0, 32)
        assert s.streams.early_slices == 2 * (LAYOUT.layers - 1)
        await s.step(32, 20)
        ended = await s.streams.commit_handoff(CommitHandoff("a", 4, 42, None, 16))
        assert ended == HandoffEnded("a", True)
        assert s.arrived(4)
        (commit,) = s.commits
        assert msgspec.msgpack.decode(commit.info, type=HandoffInfo) == HandoffInfo(42, None, 16)
        stats = s.reader.endpoint.landing_stats(LANDING)
        assert stats is None or stats.first_slice_at < s.streams.last_layer_at
        assert s.streams.layer_writer(RunStep(2, (SequenceStep("a", 0, 1, b"", PAGES),))) is None


async def test_a_cached_prefix_goes_out_with_the_first_step() -> None:
    async with scene() as s:
        s.open_handoff()
        s.streams.send_blocks(SendBlocks("a", 0, 3, to_pool=False))
        await s.step(48, 5)
        await eventually(lambda: s.arrived(4), "all blocks are there before the commit")
        assert (await s.streams.commit_handoff(CommitHandoff("a", 4, 1, None, 48))).ok


async def test_a_missing_block_is_the_receivers_verdict() -> None:
    async with scene() as s:
        s.open_handoff()
        await s.step(0, 32)
        ended = await s.streams.commit_handoff(CommitHandoff("a", 4, 1, None, 0))
        assert not ended.ok
        assert ended.error
        assert not s.commits[0].ok


async def test_blocks_touched_before_the_pool_answers_are_sent_whole_at_the_end() -> None:
    async with scene() as s:
        s.open_put()
        sequence = SequenceStep("a", 0, 64, b"", PAGES)
        on_layer = s.streams.layer_writer(RunStep(1, (sequence,)))
        assert on_layer is not None
        on_layer(0)  # nobody was given the chance to answer
        for layer in range(1, LAYOUT.layers):
            await asyncio.to_thread(on_layer, layer)
        assert await s.streams.commit_pool_write("a") == PoolWriteEnded("a", 4)
        assert len(s.pool.held) == 4
        for i, key in enumerate(KEYS):
            assert s.reader.read(s.pool.held[NAMESPACE, key][0]) == s.content[PAGES[i]]


async def test_only_what_the_pool_lacks_is_sent() -> None:
    async with scene() as s:
        s.open_put()
        s.streams.send_blocks(SendBlocks("a", 0, 4, to_handoff=False))
        assert (await s.streams.commit_pool_write("a")).stored == 4
        sent = s.writer.endpoint.counters()["bytes_sent"]
        s.open_put()
        s.streams.send_blocks(SendBlocks("a", 0, 4, to_handoff=False))
        assert await s.streams.commit_pool_write("a") == PoolWriteEnded("a", 0)
        assert s.writer.endpoint.counters()["bytes_sent"] == sent


async def test_a_pool_that_is_gone_ends_the_write_with_the_reason() -> None:
    async with scene() as s:
        s.open_put(NodeRef("nobody", "x", tcp="127.0.0.1:1"))
        s.streams.send_blocks(SendBlocks("a", 0, 4, to_handoff=False))
        ended = await s.streams.commit_pool_write("a")
        assert (ended.stored, bool(ended.error)) == (0, True)


async def test_aborts_end_each_stream_once_and_publish_nothing() -> None:
    async with scene() as s:
        s.open_handoff()
        s.open_put()
        await s.step(0, 64)
        endings = await asyncio.gather(*s.streams.abort(AbortStreams("a")))
        assert {type(e) for e in endings} == {HandoffEnded, PoolWriteEnded}
        assert s.streams.abort(AbortStreams("a")) == []
        await eventually(lambda: len(s.commits) == 1 and not s.commits[0].ok, "the receiver is told")
        assert s.pool.held == {}


async def test_half_an_abort_leaves_the_other_half() -> None:
    async with scene() as s:
        s.open_handoff()
        s.open_put()
        await s.step(0, 64)
        (ending,) = s.streams.abort(AbortStreams("a", pool=False))
        assert not (await ending).ok  # type: ignore[union-attr]
        assert (await s.streams.commit_pool_write("a")).stored == 4


def hashed(s: Scene, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often the writer reads each (page, layer) slice; it reads slices only to hash them."""
    reads: Counter[tuple[int, int]] = Counter()
    slice_of = s.writer.arena.slice

    def counted(page: int, layer: int) -> memoryview:
        reads[page, layer] += 1
        return slice_of(page, layer)

    monkeypatch.setattr(s.writer.arena, "slice", counted)
    return reads


async def test_a_slice_is_hashed_once_for_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as s:
        s.open_handoff()
        s.open_put()
        await s.granted()
        reads = hashed(s, monkeypatch)
        await s.step(0, 64)
        assert (await s.streams.commit_handoff(CommitHandoff("a", 4, 1, None, 0))).ok
        assert await s.streams.commit_pool_write("a") == PoolWriteEnded("a", 4)
        assert reads == dict.fromkeys(((page, layer) for page in PAGES for layer in range(LAYOUT.layers)), 1)


@pytest.mark.parametrize("with_step", [True, False])
async def test_a_cached_prefix_is_hashed_once_for_both_streams(
    with_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene() as s:
        s.open_handoff()
        s.open_put()
        await s.granted()
        reads = hashed(s, monkeypatch)
        s.streams.send_blocks(SendBlocks("a", 0, 3 if with_step else 4))
        if with_step:
            await s.step(48, 16)
        assert (await s.streams.commit_handoff(CommitHandoff("a", 4, 1, None, 48))).ok
        assert (await s.streams.commit_pool_write("a")).stored == 4
        assert set(reads.values()) == {1}
        assert s.arrived(4)


async def test_a_block_that_goes_on_growing_is_hashed_as_it_is_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene() as s:
        s.open_handoff()
        s.open_put()
        await s.granted()
        await s.step(0, 8)
        s.content[PAGES[0]] = s.writer.fill(PAGES[0])
        await s.step(8, 56)
        assert (await s.streams.commit_handoff(CommitHandoff("a", 4, 1, None, 0))).ok
        assert (await s.streams.commit_pool_write("a")).stored == 4
        assert s.arrived(4)
