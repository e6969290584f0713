"""A link's two threads: order, ends, and that the end is told once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.transports.base import Connection, PeerLost, Timeouts
from shared.dataplane.transports.tcp import TcpTransport
from shared.dataplane.wire.connection import FramedConnection, Job
from shared.dataplane.wire.frames import Abort, Message
from shared.dataplane.wire.framing import Extent, Frame
from shared.protocol.errors import Internal, TsukimiError


class Ends:
    """A real connection: the near end for a link, the far end for the test."""

    def __init__(self) -> None:
        self.memory = Memory(4096)
        transport = TcpTransport(self.memory, Timeouts(stall_s=5.0))
        listener = transport.listen()
        self.near: Connection = transport.connect(listener.address)
        self.far: Connection = listener.accept()
        listener.close()
        self.frames: list[Message] = []
        self.lost: list[TsukimiError] = []
        self.over = threading.Event()

    def link(self, queue_limit: int = 10) -> FramedConnection:
        return FramedConnection(
            lambda: self.near, self._on_frame, self._on_lost, name="t", queue_limit=queue_limit
        )

    def _on_frame(self, frame: Frame, connection: Connection) -> None:
        self.frames.append(frame.message)
        if frame.message == Abort(13):
            raise ZeroDivisionError("a bug")

    def _on_lost(self, error: TsukimiError) -> None:
        self.lost.append(error)
        self.over.set()

    def close(self) -> None:
        for connection in (self.near, self.far):
            connection.cut()
            connection.close()
        self.memory.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def sending(number: int, extents: Sequence[Extent] = ()) -> Job:
    return lambda connection: connection.send(Abort(number), extents)


def test_jobs_go_out_in_order_also_those_posted_before_the_start(ends: Ends) -> None:
    link = ends.link()
    for i in range(5):
        assert link.post(sending(i))
    link.start()
    for i in range(5, 50):
        assert link.post(sending(i), wait=True)
    assert [ends.far.receive().message for _ in range(50)] == [Abort(i) for i in range(50)]
    link.sever(PeerLost("enough"))
    assert link.join(10)


def test_the_end_is_told_once_with_the_first_reason(ends: Ends) -> None:
    link = ends.link()
    link.start()
    link.sever(PeerLost("first"))
    link.sever(PeerLost("second"))
    assert link.join(10)
    assert [error.message for error in ends.lost] == ["first"]
    assert not link.post(sending(1))
    assert not link.post(sending(1), wait=True)


def test_a_writer_waiting_for_a_full_queue_is_freed_by_the_end(ends: Ends) -> None:
    link = ends.link(queue_limit=1)
    assert link.post(sending(0), wait=True)
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(link.post(sending(1), wait=True)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    link.sever(PeerLost("gone"))
    waiting.join(10)
    assert results == [False]


def test_a_failing_start_is_the_reason_it_is_lost_for() -> None:
    lost: list[TsukimiError] = []

    def refuse() -> Connection:
        raise PeerLost("nobody there")

    link = FramedConnection(refuse, lambda frame, connection: None, lost.append, name="t", queue_limit=1)
    link.post(sending(0))
    link.start()
    assert link.join(10)
    assert [error.message for error in lost] == ["nobody there"]


def test_a_bug_in_a_handler_ends_the_link_as_internal(ends: Ends) -> None:
    link = ends.link()
    link.start()
    ends.far.send(Abort(1))
    ends.far.send(Abort(13))
    assert ends.over.wait(10)
    assert link.join(10)
    assert ends.frames == [Abort(1), Abort(13)]
    assert isinstance(ends.lost[0], Internal)


def test_the_peer_hanging_up_ends_it(ends: Ends) -> None:
    link = ends.link()
    link.start()
    ends.far.cut()
    assert link.join(10)
    assert isinstance(ends.lost[0], PeerLost)
