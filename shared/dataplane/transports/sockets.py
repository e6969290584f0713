"""Frames over a blocking stream socket: what the transports have in common.

The time-outs are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), not Python's, which would cost a poll before every call.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.transports.base import PeerLost, Timeouts
from shared.dataplane.wire.frames import Message
from shared.dataplane.wire.framing import Extent, Frame, FrameDecoder, FrameError, encode

MAX_IOV = 512
"""Buffers in one system call; the kernel's own limit is 1024."""
SCRATCH_BYTES = 256 << 10
BACKLOG = 128

C = TypeVar("C", bound="SocketConnection")


class SocketConnection:
    """A Connection with inline payloads: sendmsg straight from the memory, recvmsg_into straight into it."""

    name = "socket"

    def __init__(self, sock: socket.socket, memory: Memory, timeouts: Timeouts) -> None:
        self._sock = sock
        self._memory = memory
        self._timeouts = timeouts
        self._decoder = FrameDecoder()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        sock.settimeout(None)
        _set_timeout(sock, socket.SO_SNDTIMEO, timeouts.stall_s)
        _set_timeout(sock, socket.SO_RCVTIMEO, timeouts.stall_s)

    def send(self, message: Message, extents: Sequence[Extent] = ()) -> None:
        view = self._memory.view
        payload = [view[start : start + length] for start, length in extents]
        head = encode(message, sum(length for _, length in extents))
        self._send_all([memoryview(head), *payload])

    def receive(self, timeout_s: float | None = None) -> Frame:
        self._drop_payload()
        if timeout_s is not None:
            _set_timeout(self._sock, socket.SO_RCVTIMEO, timeout_s)
        try:
            return self._next_frame(patient=timeout_s is None)
        finally:
            if timeout_s is not None:
                _set_timeout(self._sock, socket.SO_RCVTIMEO, self._timeouts.stall_s)

    def take(self, extents: Sequence[Extent], keep: Callable[[], bool]) -> bool:
        check_lengths(extents, self._decoder.payload_left)
        view = self._memory.view
        left = [view[start : start + length] for start, length in extents]
        while left:
            if not keep():
                return False
            left = self._receive_some(left)
        return keep()

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # never connected, or over already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _next_frame(self, patient: bool) -> Frame:
        decoder = self._decoder
        while True:
            target = self._scratch[: min(decoder.wanted(), SCRATCH_BYTES)]
            try:
                count = self._sock.recv_into(target)
            except BlockingIOError:
                if patient and not decoder.midway:
                    continue
                raise PeerLost(f"nothing from the peer in time ({self.name})") from None
            except OSError as e:
                raise PeerLost(f"receiving failed ({self.name}): {e}") from e
            if not count:
                raise PeerLost("cut in the middle of a frame" if decoder.midway else "closed by the peer")
            try:
                frame = decoder.feed(target[:count])
            except FrameError as e:
                raise PeerLost(f"rubbish from the peer: {e}") from e
            if frame is not None:
                return frame

    def _receive_some(self, views: list[memoryview]) -> list[memoryview]:
        """Whatever is there, at least a byte, into the views; returns what is still to be filled."""
        try:
            count = self._sock.recvmsg_into(views[:MAX_IOV])[0]
        except BlockingIOError:
            raise PeerLost(f"stalled in the middle of a payload ({self.name})") from None
        except OSError as e:
            raise PeerLost(f"receiving failed ({self.name}): {e}") from e
        if not count:
            raise PeerLost("cut in the middle of a payload")
        self._decoder.payload_taken(count)
        return _advance(views, count)

    def _drop_payload(self) -> None:
        while self._decoder.payload_left:
            self._receive_some([self._scratch[: min(self._decoder.payload_left, SCRATCH_BYTES)]])

    def _send_all(self, buffers: list[memoryview]) -> None:
        try:
            while buffers:
                buffers = _advance(buffers, self._sock.sendmsg(buffers[:MAX_IOV]))
        except BlockingIOError:
            raise PeerLost(f"the peer takes nothing any more ({self.name})") from None
        except OSError as e:
            raise PeerLost(f"sending failed ({self.name}): {e}") from e


def accept(listening: socket.socket, wrap: Callable[[socket.socket], C]) -> C:
    """The next caller that is still there. Raises PeerLost once the socket is closed."""
    while True:
        try:
            sock, _ = listening.accept()
        except OSError as e:
            if e.errno in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.01)
                continue
            raise PeerLost(f"not listening any more: {e}") from e
        try:
            return wrap(sock)
        except (OSError, PeerLost):
            sock.close()


def stop_listening(sock: socket.socket) -> None:
    """Closing alone would leave a thread in accept() there for ever."""
    with contextlib.suppress(OSError):  # closed before
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _advance(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views after their first `count` bytes."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]] if count else views[i:]
        count -= len(view)
    return []


def check_lengths(extents: Sequence[Extent], payload_bytes: int) -> None:
    wanted = sum(length for _, length in extents)
    if wanted != payload_bytes:
        raise PeerLost(f"{payload_bytes} payload bytes came where {wanted} belong")


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """In the kernel; 0 there would mean never, so the least is a microsecond."""
    whole, micros = divmod(max(1, int(seconds * 1e6)), 1_000_000)
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micros))
    except OSError as e:
        raise PeerLost(f"the connection is closed: {e}") from e
