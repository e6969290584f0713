"""The cache node's machine: puts, reads, leases, eviction, block events."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.core.cache import events as c
from shared.core.cache.config import CacheConfig
from shared.core.cache.machine import CacheMachine
from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.core.machine import Ticked
from shared.protocol.ids import BlockKey

NS = b"n" * 16
T = TypeVar("T")


def key(i: int) -> BlockKey:
    return i.to_bytes(16, "big")


def landing(i: int) -> bytes:
    return i.to_bytes(16, "little")


def only(commands: list[Any], type_: type[T]) -> T:
    (found,) = (command for command in commands if isinstance(command, type_))
    return found


class Bench:
    """A machine, checked after every event, with shorthands."""

    def __init__(self, **config: Any) -> None:
        self.machine = CacheMachine(
            CacheConfig(**{"pages": 8, "put_share": 1.0, "read_share": 1.0, **config})
        )
        self.now = 0.0
        self.numbers = 0
        self.published: list[PublishBlocks] = []

    def feed(self, event: Any) -> list[Any]:
        commands: list[Any] = self.machine.handle(event, self.now)
        self.machine.check()
        self.published += [command for command in commands if isinstance(command, PublishBlocks)]
        return commands

    def open_put(self, *keys: int, namespace: bytes = NS) -> c.GrantPut:
        self.numbers += 1
        event = c.PutOpened(landing(self.numbers), namespace, tuple(map(key, keys)))
        return only(self.feed(event), c.GrantPut)

    def commit(self, grant: c.GrantPut, without: tuple[int, ...] = ()) -> int:
        checksums = {i: 1000 + i for i in grant.wanted if i not in without}
        return only(self.feed(c.PutCommitted(grant.landing, checksums)), c.ConfirmPut).stored

    def put(self, *keys: int, namespace: bytes = NS) -> int:
        return self.commit(self.open_put(*keys, namespace=namespace))

    def read(self, *keys: int, namespace: bytes = NS) -> c.GrantRead:
        self.numbers += 1
        event = c.ReadOpened(self.numbers, namespace, tuple(map(key, keys)))
        return only(self.feed(event), c.GrantRead)

    def has(self, *keys: int, namespace: bytes = NS) -> int:
        grant = self.read(*keys, namespace=namespace)
        self.feed(c.ReadClosed(grant.lease))
        return len(grant.pages)

    def tick(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.feed(Ticked())


def test_blocks_put_can_be_read_with_their_checksums_and_are_published() -> None:
    bench = Bench()
    grant = bench.open_put(1, 2, 3)
    assert grant.wanted == (0, 1, 2)
    assert bench.published == []
    assert bench.commit(grant) == 3
    assert bench.published == [PublishBlocks(1, (key(1), key(2), key(3)), ())]
    read = bench.read(1, 2, 3, 4)
    assert read.pages == grant.pages
    assert read.checksums == (1000, 1001, 1002)


def test_a_hole_ends_the_run() -> None:
    bench = Bench()
    bench.put(1, 2)
    bench.put(4, 5)
    assert bench.has(1, 2, 3, 4, 5) == 2
    assert bench.has(3, 4, 5) == 0


def test_two_writers_of_one_block_do_not_meet() -> None:
    bench = Bench()
    first = bench.open_put(1, 2)
    second = bench.open_put(1, 2, 3)
    assert second.wanted == (2,)
    assert not set(first.pages) & set(second.pages)
    assert bench.commit(second) == 1
    assert bench.commit(first) == 2
    assert bench.open_put(1, 2, 3).wanted == ()
    assert bench.has(1, 2, 3) == 3


def test_a_writer_that_died_does_not_block_a_key_for_ever() -> None:
    bench = Bench(put_lease_s=10.0)
    dead = bench.open_put(1, 2)
    bench.tick(9.9)
    assert bench.open_put(1, 2).wanted == ()
    commands = bench.tick(0.2)
    assert only(commands, c.FencePut).landing == dead.landing
    second = bench.open_put(1, 2)
    assert second.wanted == (0, 1)
    assert not set(second.pages) & set(dead.pages), "pages may still be written into before the fence stands"
    assert bench.commit(dead) == 0
    assert bench.commit(second) == 2
    bench.feed(c.PutFenced(dead.landing))
    bench.feed(c.PutFenced(dead.landing))
    assert bench.machine.pool.free == 6
    assert bench.machine.counters["puts_expired"] == 1


def test_a_put_that_gets_data_keeps_its_lease() -> None:
    bench = Bench(put_lease_s=10.0)
    grant = bench.open_put(1)
    bench.tick(9.0)
    bench.feed(c.PutProgressed((grant.landing, b"unknown")))
    assert bench.tick(9.0) == []
    assert bench.machine.open_puts == (grant.landing,)
    assert bench.commit(grant) == 1


def test_an_expired_read_is_a_miss_and_no_exception() -> None:
    bench = Bench(pages=2, read_lease_s=5.0)
    bench.put(1, 2)
    read = bench.read(1, 2)
    assert bench.open_put(3, 4).wanted == (), "pinned pages are never evicted"
    bench.tick(5.0)
    assert bench.put(3, 4) == 2
    bench.feed(c.ReadClosed(read.lease))
    assert bench.has(1, 2) == 0
    assert bench.machine.counters["reads_expired"] == 1


def test_a_full_pool_deadlocks_neither_reads_nor_puts() -> None:
    bench = Bench(pages=8, put_share=0.5, read_share=0.75)
    bench.put(1, 2, 3, 4)
    bench.put(5, 6, 7, 8)
    read = bench.read(1, 2, 3, 4)
    other = bench.read(5, 6, 7, 8)
    assert (len(read.pages), len(other.pages)) == (4, 2), "reads leave room for puts"
    put = bench.open_put(11, 12, 13, 14)
    assert put.wanted == (0, 1), "a put takes what there is and never waits"
    assert bench.commit(put) == 2
    bench.feed(c.ReadClosed(read.lease))
    bench.feed(c.ReadClosed(other.lease))
    first, second = bench.open_put(21, 22, 23), bench.open_put(24, 25, 26)
    assert (len(first.wanted), len(second.wanted)) == (3, 1), "puts leave what reads want"
    assert bench.machine.counters["blocks_refused"] == 4


def test_least_recently_used_goes_first_and_the_tail_of_a_chain_before_its_head() -> None:
    bench = Bench(pages=6)
    bench.put(1, 2, 3)
    bench.put(11, 12, 13)
    bench.has(1, 2, 3)
    bench.put(21)
    bench.put(22)
    assert [k for event in bench.published for k in event.removed] == [key(13), key(12)]
    assert bench.machine.counters["blocks_evicted"] == 2


def test_a_put_never_evicts_the_beginning_of_its_own_chain() -> None:
    bench = Bench(pages=4)
    bench.put(1, 2)
    bench.put(11, 12)
    assert bench.put(1, 2, 3, 4) == 2
    assert bench.has(1, 2, 3, 4) == 4


def test_blocks_that_did_not_come_are_not_stored_and_their_pages_come_back() -> None:
    bench = Bench()
    assert bench.commit(bench.open_put(1, 2, 3), without=(1,)) == 2
    assert bench.has(1, 2, 3) == 1
    assert bench.machine.pool.free == 6
    assert bench.open_put(1, 2, 3).wanted == (1,)


def test_an_aborted_put_leaves_nothing() -> None:
    bench = Bench()
    grant = bench.open_put(1, 2)
    bench.feed(c.PutAborted(grant.landing))
    bench.feed(c.PutAborted(grant.landing))
    assert bench.machine.pool.free == 8
    assert bench.commit(grant) == 0
    assert bench.open_put(1, 2).wanted == (0, 1)
    assert bench.published == []


def test_namespaces_never_meet() -> None:
    bench = Bench()
    bench.put(1, 2)
    assert bench.has(1, 2, namespace=b"other") == 0
    other = bench.open_put(1, 2, namespace=b"o" * 16)
    assert other.wanted == (0, 1)
    assert not set(other.pages) & set(bench.read(1, 2).pages)
    assert bench.commit(other) == 2
    assert bench.has(1, 2) == bench.has(1, 2, namespace=b"o" * 16) == 2
    assert [p.stored for p in bench.published] == [(key(1), key(2))] * 2
    assert only(bench.feed(SnapshotWanted()), PublishSnapshot).keys == (key(1), key(2)) * 2


def test_a_commit_with_indices_nobody_wanted_stores_only_what_was_granted() -> None:
    bench = Bench()
    grant = bench.open_put(1)
    assert only(bench.feed(c.PutCommitted(grant.landing, {0: 1, 7: 2})), c.ConfirmPut).stored == 1


def test_before_the_arena_there_is_no_room_and_nothing_breaks() -> None:
    bench = Bench(pages=0)
    assert bench.open_put(1).wanted == ()
    assert bench.read(1).pages == ()
    bench.feed(c.ArenaLaidOut(4))
    bench.feed(c.ArenaLaidOut(400))
    assert bench.machine.pool.total == 4
    assert bench.put(1) == 1


def test_unknown_ids_are_ignored() -> None:
    bench = Bench()
    for event in (c.PutAborted(b"x"), c.PutFenced(b"x"), c.ReadClosed(77), c.PutProgressed((b"x",))):
        assert bench.feed(event) == []


def test_repeats_are_harmless() -> None:
    bench = Bench()
    opened = c.PutOpened(landing(50), NS, (key(1),))
    assert only(bench.feed(opened), c.GrantPut).wanted == (0,)
    assert only(bench.feed(opened), c.GrantPut).wanted == ()
    asked = c.ReadOpened(51, NS, (key(1),))
    bench.feed(c.PutCommitted(landing(50), {0: 9}))
    assert len(only(bench.feed(asked), c.GrantRead).pages) == 1
    assert only(bench.feed(asked), c.GrantRead).pages == ()
    bench.feed(c.ReadClosed(51))
    assert bench.machine.pool.held == 0


def test_a_snapshot_holds_every_readable_key_and_the_last_seq() -> None:
    bench = Bench()
    bench.put(1, 2)
    bench.open_put(3)
    (snapshot,) = bench.feed(SnapshotWanted())
    assert isinstance(snapshot, PublishSnapshot)
    assert (snapshot.seq, set(snapshot.keys)) == (1, {key(1), key(2)})


def test_many_changes_are_published_in_several_events_of_consecutive_seq() -> None:
    bench = Bench(pages=64, publish_keys=10)
    bench.put(*range(25))
    assert [event.seq for event in bench.published] == [1, 2, 3]
    assert [k for event in bench.published for k in event.stored] == [key(i) for i in range(25)]


def test_a_prompt_of_ten_thousand_blocks_is_one_cheap_event() -> None:
    bench = Bench(pages=12_000)
    assert bench.put(*range(10_000)) == 10_000
    assert bench.has(*range(10_000)) == 10_000


class CacheLaws(RuleBasedStateMachine):
    """Whatever happens in whatever order, check() holds and the published events add up to what can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(
            pages=12, put_share=0.7, read_share=0.7, put_lease_s=4.0, read_lease_s=3.0, publish_keys=3
        )
        self.puts: list[c.GrantPut] = []
        self.reads: list[c.GrantRead] = []
        self.fencing: list[bytes] = []
        self.index: set[BlockKey] = set()
        self.seen = 0

    @rule(first=st.integers(0, 20), count=st.integers(1, 8))
    def open_put(self, first: int, count: int) -> None:
        grant = self.bench.open_put(*range(first, first + count))
        taken = {page for other in self.puts for page in other.pages}
        assert not taken & set(grant.pages), "a page was given out twice"
        if grant.wanted:
            self.puts.append(grant)

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), missing=st.sets(st.integers(0, 7)))
    def commit(self, data: st.DataObject, missing: set[int]) -> None:
        grant = self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1)))
        self.bench.commit(grant, without=tuple(missing))

    @precondition(lambda self: self.puts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        grant = self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1)))
        self.bench.feed(c.PutAborted(grant.landing))

    @rule(first=st.integers(0, 20), count=st.integers(1, 8))
    def read(self, first: int, count: int) -> None:
        self.reads.append(self.bench.read(*range(first, first + count)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def close_read(self, data: st.DataObject) -> None:
        self.bench.feed(c.ReadClosed(self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1))).lease))

    @rule(seconds=st.floats(0, 2))
    def tick(self, seconds: float) -> None:
        for command in self.bench.tick(seconds):
            if isinstance(command, c.FencePut):
                self.fencing.append(command.landing)

    @precondition(lambda self: self.fencing)
    @rule()
    def fenced(self) -> None:
        gone = self.fencing.pop()
        self.bench.feed(c.PutFenced(gone))
        self.puts = [grant for grant in self.puts if grant.landing != gone]

    @invariant()
    def events_add_up(self) -> None:
        for event in self.bench.published[self.seen :]:
            self.index |= set(event.stored)
            self.index -= set(event.removed)
        self.seen = len(self.bench.published)
        assert [event.seq for event in self.bench.published] == list(range(1, self.seen + 1))
        (snapshot,) = self.bench.machine.handle(SnapshotWanted(), self.bench.now)
        assert isinstance(snapshot, PublishSnapshot)
        assert set(snapshot.keys) == self.index


CacheLaws.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheLaws = CacheLaws.TestCase


@pytest.mark.parametrize("events", [1, 2])
def test_the_same_events_give_the_same_commands(events: int) -> None:
    def run() -> list[Any]:
        bench = Bench(pages=5)
        for i in range(40):
            grant = bench.open_put(i, i + 1, i * events)
            bench.commit(grant, without=(1,) if i % 3 == 0 else ())
            bench.has(i, i + 1)
        return list(bench.published)

    assert run() == run()
