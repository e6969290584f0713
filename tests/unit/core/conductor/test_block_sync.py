from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.conductor.block_index import BlockIndex
from shared.core.conductor.block_sync import ASK_AGAIN_S, BEHIND_S, BlockSync
from shared.protocol.cluster import BlockEvents, BlockSnapshotPart


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def keys(*ids: int) -> tuple[bytes, ...]:
    return tuple(key(i) for i in ids)


def events(
    seq: int, stored: tuple[bytes, ...] = (), removed: tuple[bytes, ...] = (), life: str = "1"
) -> BlockEvents:
    return BlockEvents(node="n", incarnation=life, seq=seq, stored=stored, removed=removed)


def part(seq: int, i: int, of: int, held: tuple[bytes, ...], life: str = "1") -> BlockSnapshotPart:
    return BlockSnapshotPart(node="n", incarnation=life, seq=seq, part=i, parts=of, keys=held)


def opened() -> BlockSync:
    streams = BlockSync(BlockIndex())
    streams.opened("n", "1")
    return streams


def held(streams: BlockSync, *ids: int) -> list[int]:
    streams.check()
    return [i for i in ids if streams.index.match(keys(i)).run("n")]


def test_a_new_life_is_followed_from_its_first_event_on() -> None:
    streams = opened()
    streams.changed(events(1, keys(1, 2)))
    streams.changed(events(2, keys(3), keys(1)))
    streams.changed(events(2, keys(9)))
    assert held(streams, 1, 2, 3, 9) == [2, 3]
    assert streams.synced("n")
    assert streams.asks(0.0) == []


def test_a_lost_event_is_noticed_and_mended_by_a_snapshot() -> None:
    streams = opened()
    streams.changed(events(1, keys(1)))
    streams.changed(events(3, keys(3)))
    assert not streams.synced("n")
    assert streams.asks(10.0) == ["n"]
    assert streams.asks(10.5) == []
    streams.changed(events(4, keys(4)))
    streams.snapshot_arrived(part(3, 1, 2, keys(3)))
    assert held(streams, 1, 2, 3, 4) == [1, 3, 4]
    streams.snapshot_arrived(part(3, 0, 2, keys(2)))
    assert held(streams, 1, 2, 3, 4) == [2, 3, 4]
    assert streams.synced("n")
    streams.changed(events(5, removed=keys(2)))
    assert held(streams, 2, 3) == [3]
    assert streams.gaps == 1


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    streams = opened()
    assert streams.asks(0.0) == ["n"]
    assert streams.asks(ASK_AGAIN_S) == ["n"]
    streams.snapshot_arrived(part(0, 0, 1, ()))
    assert streams.asks(10 * ASK_AGAIN_S) == []


def test_a_gap_after_the_snapshot_asks_for_another() -> None:
    streams = opened()
    streams.changed(events(5, keys(5)))
    streams.changed(events(8, keys(8)))
    streams.snapshot_arrived(part(5, 0, 1, keys(5)))
    assert not streams.synced("n")
    streams.snapshot_arrived(part(8, 0, 1, keys(5, 6, 8)))
    assert streams.synced("n")
    assert held(streams, 5, 6, 7, 8) == [5, 6, 8]


def test_parts_of_different_snapshots_are_not_mixed() -> None:
    streams = opened()
    streams.snapshot_arrived(part(4, 0, 2, keys(1)))
    streams.snapshot_arrived(part(6, 1, 2, keys(2)))
    streams.snapshot_arrived(part(4, 1, 2, keys(3)))
    assert held(streams, 1, 2, 3) == []
    streams.snapshot_arrived(part(6, 0, 2, keys(4)))
    assert held(streams, 1, 2, 3, 4) == [2, 4]


def test_a_new_life_drops_everything_of_the_old() -> None:
    streams = opened()
    streams.changed(events(1, keys(1)))
    streams.opened("n", "2")
    streams.changed(events(2, keys(2)))
    streams.snapshot_arrived(part(9, 0, 1, keys(3)))
    assert held(streams, 1, 2, 3) == []
    streams.changed(events(1, keys(4), life="2"))
    assert held(streams, 1, 2, 3, 4) == [4]
    streams.closed("n")
    assert held(streams, 4) == []


def test_a_lost_last_event_shows_in_the_heartbeat() -> None:
    streams = opened()
    streams.changed(events(1, keys(1)))
    streams.heartbeat("n", "1", 2, 0.0)
    assert streams.synced("n")
    streams.heartbeat("n", "1", 2, BEHIND_S / 2)
    assert streams.synced("n")
    streams.heartbeat("n", "1", 2, BEHIND_S)
    assert streams.asks(BEHIND_S) == ["n"]


def test_a_heartbeat_a_little_ahead_of_its_events_is_no_gap() -> None:
    streams = opened()
    for seq in range(1, 6):
        streams.heartbeat("n", "1", seq, float(seq))
        streams.changed(events(seq, keys(seq)))
    assert streams.synced("n")
    assert streams.gaps == 0


def test_a_node_that_has_published_nothing_needs_no_snapshot() -> None:
    streams = opened()
    streams.heartbeat("n", "1", 0, 0.0)
    assert streams.asks(0.0) == []


@given(st.integers(0, 2**32), st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_the_index_ends_in_step(seed: int, loss: float) -> None:
    """A node's stream, with events and snapshot parts lost at random, and then a quiet end."""
    draw = random.Random(seed)
    streams = opened()
    true: set[int] = set()
    seq, now = 0, 0.0

    def deliver(message: BlockEvents | BlockSnapshotPart, lossy: bool = True) -> None:
        if lossy and draw.random() < loss:
            return
        if isinstance(message, BlockEvents):
            streams.changed(message)
        else:
            streams.snapshot_arrived(message)

    def answer(lossy: bool = True) -> None:
        if streams.asks(now):
            ids = sorted(true)
            deliver(part(seq, 0, 2, keys(*ids[::2])), lossy)
            deliver(part(seq, 1, 2, keys(*ids[1::2])), lossy)

    for _ in range(40):
        now += 1.0
        seq += 1
        stored = {draw.randrange(20) for _ in range(3)} - true
        removed = {i for i in true if draw.random() < 0.2}
        true = (true - removed) | stored
        deliver(events(seq, keys(*sorted(stored)), keys(*sorted(removed))))
        streams.heartbeat("n", "1", seq, now)
        answer()
    for _ in range(3):
        now += ASK_AGAIN_S
        streams.heartbeat("n", "1", seq, now)
        answer(lossy=False)
    assert streams.synced("n")
    assert held(streams, *range(20)) == sorted(true)
