"""The ring of staging buffers: bounded, in order, a buffer never shared by two copies."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shared.engine.staging.ring import Ring  # noqa: E402
from tests.support.fakes.late_lane import LateLane  # noqa: E402


class World:
    """Copies of numbers through a ring of one-byte buffers, by a lane that is late."""

    def __init__(self, buffers: int) -> None:
        self.lane = LateLane()
        self.ring = Ring([self.lane.buffer(1) for _ in range(buffers)])
        self.arrived: list[int] = []
        self.begun = 0

    def stage(self) -> None:
        number = self.begun
        self.begun += 1
        self.ring.stage(
            lambda buffer: self.lane.submit(lambda: buffer.fill_(number)),
            lambda buffer: self.arrived.append(int(buffer[0])),
        )
        self.ring.check()


def test_nothing_is_waited_for_while_there_is_a_free_buffer() -> None:
    world = World(3)
    for _ in range(3):
        world.stage()
    assert (len(world.lane.waiting), world.arrived, len(world.ring)) == (3, [], 3)


def test_a_full_ring_ends_its_oldest_copy_and_no_other() -> None:
    world = World(3)
    for _ in range(4):
        world.stage()
    assert world.arrived == [0]
    assert (len(world.lane.waiting), len(world.ring)) == (3, 3)


def test_only_finished_copies_are_ended_without_waiting() -> None:
    world = World(3)
    world.stage()
    world.stage()
    world.ring.end_finished()
    assert world.arrived == []
    world.lane.advance()
    world.ring.end_finished()
    assert world.arrived == [0]
    world.ring.settle()
    assert world.arrived == [0, 1]
    assert len(world.ring) == 0


def test_what_is_forgotten_ends_and_brings_nothing() -> None:
    world = World(2)
    world.stage()
    world.ring.forget()
    world.stage()
    world.stage()
    world.ring.settle()
    assert world.arrived == [1, 2]


def test_an_error_of_whoever_is_told_leaves_the_ring_whole() -> None:
    world = World(2)

    def fails(buffer: object) -> None:
        raise ConnectionError("nobody listens")

    world.ring.stage(lambda buffer: world.lane.submit(lambda: buffer.fill_(9)), fails)
    world.stage()
    with pytest.raises(ConnectionError):
        world.ring.settle()
    world.ring.check()
    world.ring.settle()
    assert world.arrived == [0]


@given(st.integers(1, 4), st.lists(st.sampled_from(["stage", "advance", "end", "settle"]), max_size=60))
def test_every_copy_arrives_once_in_order_with_its_own_bytes(buffers: int, doings: list[str]) -> None:
    world = World(buffers)
    for doing in doings:
        match doing:
            case "stage":
                world.stage()
            case "advance" if world.lane.waiting:
                world.lane.advance()
            case "end":
                world.ring.end_finished()
            case "settle":
                world.ring.settle()
        world.ring.check()
        assert len(world.lane.waiting) <= len(world.ring) <= buffers
    world.ring.settle()
    assert world.arrived == list(range(world.begun))
