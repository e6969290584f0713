"""Frames over real sockets: whole messages come or none do."""

from __future__ import annotations

import queue
import socket
import threading

import msgspec
import pytest
from msgspec import Struct

pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.pipeline.channel import ChannelClosed, StageChannel, read_ahead


class Note(Struct, frozen=True, tag=True):
    number: int


class Other(Struct, frozen=True, tag=True):
    text: str


Both = Note | Other


@pytest.fixture
def ends() -> tuple[StageChannel[Both], StageChannel[Both], socket.socket]:
    """Two ends, and the first one's socket."""
    a, b = socket.socketpair()
    return StageChannel(a, Both), StageChannel(b, Both), a


def test_messages_and_payloads_come_in_order(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket],
) -> None:
    sender, receiver, _ = ends
    big = bytes(range(256)) * 10_000  # more than a socket buffers

    def send() -> None:
        sender.send(Note(1))
        sender.send(Other("x"), memoryview(big))
        sender.send(Note(2), b"end")

    thread = threading.Thread(target=send)
    thread.start()
    assert receiver.receive() == (Note(1), b"")
    assert receiver.receive() == (Other("x"), big)
    assert receiver.receive() == (Note(2), b"end")
    thread.join()


@pytest.mark.parametrize("length", [0, 1, 11, 12, 14, -1])
def test_an_end_within_a_frame_is_an_end(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket], length: int
) -> None:
    sender, receiver, raw = ends
    copy, tap = socket.socketpair()
    StageChannel(copy, Both).send(Note(7), b"payload")
    frame = tap.recv(1000)
    raw.sendall(frame[:length])
    sender.close()
    with pytest.raises(ChannelClosed):
        receiver.receive()


def test_what_came_before_the_end_is_not_lost(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket],
) -> None:
    sender, receiver, _ = ends
    sender.send(Note(1))
    sender.close()
    assert receiver.receive() == (Note(1), b"")
    with pytest.raises(ChannelClosed):
        receiver.receive()


def test_sending_to_nobody_says_so(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket],
) -> None:
    sender, receiver, _ = ends
    receiver.close()
    with pytest.raises(ChannelClosed):
        sender.send(Note(1))


def test_closing_wakes_whoever_receives_and_may_be_repeated(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket],
) -> None:
    _, receiver, _ = ends
    closed = threading.Event()
    read_ahead(receiver, lambda message: None, closed.set)
    receiver.close()
    receiver.close()
    assert closed.wait(10)


def test_reading_ahead_stops_where_there_is_no_room(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket],
) -> None:
    sender, receiver, _ = ends
    waiting: queue.Queue[tuple[Both, bytearray]] = queue.Queue(2)
    closed = threading.Event()
    read_ahead(receiver, waiting.put, closed.set)
    for number in range(5):
        sender.send(Note(number))
    sender.close()
    assert [waiting.get(timeout=10)[0] for _ in range(5)] == [Note(n) for n in range(5)]
    assert closed.wait(10)


def test_a_header_of_impossible_size_ends_the_link(
    ends: tuple[StageChannel[Both], StageChannel[Both], socket.socket],
) -> None:
    _, receiver, raw = ends
    raw.sendall(b"\xff" * 12 + msgspec.msgpack.encode(Note(1)))
    with pytest.raises(ChannelClosed):
        receiver.receive()
