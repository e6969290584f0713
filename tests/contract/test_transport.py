"""What every transport guarantees, tested on each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.transports.base import Connection, Listener, PeerLost, Setup, Timeouts, Transport
from shared.dataplane.transports.shm import ShmTransport
from shared.dataplane.transports.tcp import TcpTransport
from shared.dataplane.wire.frames import Abort, Blocks, Commit, Write
from tests.examples.transport import UnixTransport

SIZE = 1 << 20
TIMEOUTS = Timeouts(connect_s=2.0, stall_s=0.3)
MAKERS: dict[str, Callable[[Memory], Transport]] = {
    "tcp": lambda memory: TcpTransport(memory, TIMEOUTS),
    "shm": lambda memory: ShmTransport(memory, TIMEOUTS),
    "a user's own": lambda memory: UnixTransport(Setup(memory, TIMEOUTS, host="here")),
}


class Pair:
    """A listener and one connection. Both ends are in this process, each with its own memory."""

    def __init__(self, make: Callable[[Memory], Transport]) -> None:
        self.near_memory, self.far_memory = Memory(SIZE), Memory(SIZE)
        self.listener: Listener = make(self.far_memory).listen()
        self.near: Connection = make(self.near_memory).connect(self.listener.address)
        self.far: Connection = self.listener.accept()

    def close(self) -> None:
        for connection in (self.near, self.far):
            connection.cut()
            connection.close()
        self.listener.close()
        self.near_memory.close()
        self.far_memory.close()


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[Memory], Transport]:
    return MAKERS[request.param]


@pytest.fixture
def pair(make: Callable[[Memory], Transport]) -> Iterator[Pair]:
    pair = Pair(make)
    yield pair
    pair.close()


def always() -> bool:
    return True


def send_for_ever(connection: Connection) -> None:
    while True:
        connection.send(Commit(1, 1, bytes(100_000)))


def in_thread(target: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_frames_arrive_in_order_both_ways(pair: Pair) -> None:
    for i in range(20):
        pair.near.send(Abort(i))
    pair.far.send(Commit(3, 4, b"info"))
    assert [pair.far.receive().message for _ in range(20)] == [Abort(i) for i in range(20)]
    assert pair.near.receive().message == Commit(3, 4, b"info")


def test_a_payload_goes_from_memory_to_memory(pair: Pair) -> None:
    pair.near_memory.view[100:103] = b"abc"
    pair.near_memory.view[5000:5004] = b"defg"
    pair.near.send(Write(1, 0, [0], [0]), [(100, 3), (5000, 4)])
    assert pair.far.receive().payload_bytes == 7
    assert pair.far.take([(10, 2), (900, 5)], always)
    assert bytes(pair.far_memory.view[10:12]) == b"ab"
    assert bytes(pair.far_memory.view[900:905]) == b"cdefg"


def test_many_scattered_pieces_and_big_payloads(pair: Pair) -> None:
    count, size = 2000, 256
    for i in range(count):
        pair.near_memory.view[i * size : (i + 1) * size] = bytes([i % 251]) * size
    sender, errors = in_thread(
        lambda: pair.near.send(Blocks(1, 0, 1), [(i * size, size) for i in reversed(range(count))])
    )
    pair.far.receive()
    assert pair.far.take([(i * 300, 256) for i in range(count)], always)
    sender.join()
    assert not errors
    for i in range(count):
        assert pair.far_memory.view[i * 300] == (count - 1 - i) % 251 == pair.far_memory.view[i * 300 + 255]


def test_an_untaken_payload_is_dropped(pair: Pair) -> None:
    pair.near_memory.view[:4] = b"lost"
    sender, errors = in_thread(
        lambda: (pair.near.send(Blocks(1, 0, 1), [(0, SIZE)]), pair.near.send(Abort(2)))
    )
    assert pair.far.receive().payload_bytes == SIZE
    assert pair.far.receive().message == Abort(2)
    sender.join()
    assert not errors
    assert pair.far_memory.view[0] == 0


def test_taking_stops_when_told_and_the_stream_goes_on(pair: Pair) -> None:
    pair.near_memory.view[:4] = b"kept"
    sender, errors = in_thread(
        lambda: (pair.near.send(Blocks(1, 0, 1), [(0, SIZE)]), pair.near.send(Abort(1)))
    )
    pair.far.receive()
    assert not pair.far.take([(0, SIZE)], lambda: False)
    assert pair.far_memory.view[0] == 0
    assert pair.far.receive().message == Abort(1)
    sender.join()
    assert not errors


def test_a_payload_of_the_wrong_length_ends_the_connection(pair: Pair) -> None:
    pair.near.send(Blocks(1, 0, 1), [(0, 8)])
    pair.far.receive()
    with pytest.raises(PeerLost, match="8 payload bytes came where 9 belong"):
        pair.far.take([(0, 9)], always)


def test_a_peer_that_closes_is_noticed_in_receive_and_send(pair: Pair) -> None:
    pair.near.send(Abort(1))
    pair.far.receive()
    pair.near.cut()
    pair.near.close()
    with pytest.raises(PeerLost):
        pair.far.receive()
    with pytest.raises(PeerLost):
        send_for_ever(pair.far)


def test_cut_wakes_a_waiting_receiver(pair: Pair) -> None:
    thread, errors = in_thread(pair.near.receive)
    pair.near.cut()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], PeerLost)


def test_waiting_longer_than_the_stall_time_for_a_new_frame_is_no_fault(pair: Pair) -> None:
    got: list[object] = []
    thread, errors = in_thread(lambda: got.append(pair.far.receive().message))
    thread.join(3 * TIMEOUTS.stall_s)
    assert thread.is_alive()
    pair.near.send(Abort(1))
    thread.join(5)
    assert got == [Abort(1)]
    assert not errors


def test_a_receiver_may_limit_its_patience(pair: Pair) -> None:
    pair.near.send(Abort(1))
    pair.far.receive()
    with pytest.raises(PeerLost, match="nothing from the peer in time"):
        pair.far.receive(timeout_s=0.05)


def test_a_sender_whose_peer_takes_nothing_gives_up(pair: Pair) -> None:
    pair.far.send(Abort(1))
    pair.near.receive()
    with pytest.raises(PeerLost, match="takes nothing"):
        send_for_ever(pair.near)


def test_closing_a_listener_wakes_accept(pair: Pair) -> None:
    thread, errors = in_thread(pair.listener.accept)
    pair.listener.close()
    pair.listener.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(errors[0], PeerLost)


def test_nobody_there_is_said_at_once(make: Callable[[Memory], Transport]) -> None:
    memory = Memory(SIZE)
    transport = make(memory)
    listener = transport.listen()
    listener.close()
    with pytest.raises(PeerLost, match="no connection to"):
        transport.connect(listener.address)
    memory.close()


def test_addresses_are_new_in_every_life(make: Callable[[Memory], Transport]) -> None:
    memory = Memory(SIZE)
    first, second = make(memory).listen(), make(memory).listen()
    assert first.address != second.address
    first.close()
    second.close()
    memory.close()
