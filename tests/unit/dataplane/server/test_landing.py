"""What counts as arrived, and checksums as fixed facts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.dataplane.api import CommitReply
from shared.dataplane.server.arrivals import DROPPED
from shared.dataplane.server.landing import Landing, LandingTable, Reply
from shared.dataplane.wire.checksums import block_checksum, slice_checksum

LAYERS = 3


class Deaf:
    def committed(self, landing: Landing, blocks: int, info: bytes, reply: Reply) -> None:
        reply(CommitReply(True))

    def failed(self, landing: Landing, error: str) -> None:
        pass


def landing(blocks: list[int]) -> Landing:
    return Landing(b"l" * 16, {block: 100 + block for block in blocks}, LAYERS, Deaf())


slices = st.lists(
    st.tuples(
        st.sampled_from([0, 2, 3]), st.integers(0, LAYERS - 1), st.sampled_from(["good", "bad", "dropped"])
    ),
    max_size=40,
)


@given(arrived=slices)
def test_a_block_is_whole_when_the_last_thing_heard_of_each_slice_is_good(
    arrived: list[tuple[int, int, str]],
) -> None:
    room = landing([0, 2, 3])
    state: dict[tuple[int, int], str] = {}
    for i, (block, layer, how) in enumerate(arrived):
        found = {"good": i, "bad": i + 1, "dropped": DROPPED}[how]
        assert room.record(layer, [block], [i], [found], 10) == (how == "bad")
        if how != "dropped":
            state[block, layer] = how
    whole = [b for b in (0, 2, 3) if all(state.get((b, layer)) == "good" for layer in range(LAYERS))]
    assert sorted(room.whole_blocks(4)) == whole
    assert bool(room.flaw(4)) == (len(whole) != 3)
    assert room.flaw(0) == ""
    assert set(room.whole_blocks(3)) <= {0, 2}
    assert room.corrupt_blocks() == len({block for (block, _), how in state.items() if how == "bad"})
    assert (room.stats().slices, room.stats().bytes) == (len(arrived), 10 * len(arrived))


def test_block_checksums_follow_the_layers_whatever_the_order_of_arrival() -> None:
    room = landing([0])
    for layer in (2, 0, 1):
        room.record(layer, [0], [layer + 7], [layer + 7], 10)
    assert room.whole_blocks(1) == {0: block_checksum([7, 8, 9])}


def test_checksums_are_the_same_on_every_machine() -> None:
    assert slice_checksum(b"tsukimi") == 0x270DE638FE1E8114
    assert block_checksum([1, 2, 3]) == 0x7C68B4906E7EA780


def test_only_the_first_binds() -> None:
    room = landing([0])
    assert room.bind("first")
    assert not room.bind("second")
    closed = landing([0])
    closed.fence.close()
    assert not closed.bind("late")


def test_ids_are_minted_once() -> None:
    table = LandingTable()
    table.add(landing([0]))
    with pytest.raises(ValueError, match="open already"):
        table.add(landing([0]))
    table.remove(b"l" * 16)
    table.remove(b"l" * 16)
    assert table.get(b"l" * 16) is None
