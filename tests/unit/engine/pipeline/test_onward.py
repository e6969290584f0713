"""A stage and the next one over a real socket: pieces go when they are wanted, and the end of the next one is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.attention.api import Span  # noqa: E402
from shared.engine.pipeline.channel import ChannelClosed, StageChannel  # noqa: E402
from shared.engine.pipeline.messages import Reached, Rows  # noqa: E402
from shared.engine.pipeline.onward import Onward  # noqa: E402
from shared.engine.pipeline.seam import Seam  # noqa: E402
from tests.support.until import until  # noqa: E402


class Ends:
    """One stage's Onward, its layers 0..8 of which the next one has 4..8 too, and the next one's link."""

    def __init__(self) -> None:
        a, b = socket.socketpair()
        self.lost = threading.Event()
        self.onward = Onward(StageChannel(a, Reached), Seam(4, 8), self.lost.set)
        self.next: StageChannel[Rows] = StageChannel(b, Rows)
        self.computed: list[int] = []

    def carry(self, step: int = 1, layer: int = 0) -> int:
        rows = Rows(step, layer, (Span(0, 2, (0,), 0),), (), False)
        return self.onward.carry(rows, torch.zeros(2, 3), self._through)

    def _through(self, layers: range) -> None:
        assert layers
        self.computed += layers


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.onward.close()
    made.next.close()


def test_a_stage_without_work_gets_the_first_piece_early(ends: Ends) -> None:
    assert ends.carry(layer=2) == 4
    assert ends.computed == [2, 3]
    rows, payload = ends.next.receive()
    assert rows.layer == 4
    assert len(payload) == 2 * 3 * 4


async def test_a_piece_goes_on_as_far_as_the_one_before_is_written(ends: Ends) -> None:
    ends.carry()
    thread = threading.Thread(target=ends.carry)
    thread.start()
    ends.next.send(Reached(1, 7, False))
    await until(lambda: ends.computed[4:] == [0, 1, 2, 3, 4, 5, 6])
    assert thread.is_alive()
    ends.next.send(Reached(1, 11, True))
    thread.join(10)
    assert [ends.next.receive()[0].layer for _ in range(2)] == [4, 7]


def test_a_new_step_does_not_wait(ends: Ends) -> None:
    ends.carry()
    assert ends.carry(step=2) == 8


@pytest.mark.timeout(60)
def test_who_waits_learns_that_the_next_stage_has_gone(ends: Ends) -> None:
    ends.carry()
    threading.Timer(0.1, ends.next.close).start()
    with pytest.raises(ChannelClosed):
        ends.carry()
    assert ends.lost.wait(10)
