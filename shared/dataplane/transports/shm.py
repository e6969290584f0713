"""Shared memory on one host: frames over an abstract unix socket, payloads by reference.

Each side hands the other, once, a descriptor to read its memory by. Whoever receives copies from the sender's memory
into its own, so nobody ever writes into foreign memory; the sender leaves the bytes alone until it is answered.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.transports.base import PeerLost, Setup, Timeouts
from shared.dataplane.transports.sockets import (
    BACKLOG,
    MAX_IOV,
    SocketConnection,
    accept,
    check_lengths,
    stop_listening,
)
from shared.dataplane.wire.frames import Message
from shared.dataplane.wire.framing import Extent, Frame, encode


class ShmConnection(SocketConnection):
    name = "shm"

    def __init__(self, sock: socket.socket, memory: Memory, timeouts: Timeouts) -> None:
        super().__init__(sock, memory, timeouts)
        self._peer_fd = -1
        self._extents: tuple[Extent, ...] = ()
        self._hand_over_memory()

    def send(self, message: Message, extents: Sequence[Extent] = ()) -> None:
        head = encode(message, sum(length for _, length in extents), extents)
        self._send_all([memoryview(head)])

    def receive(self, timeout_s: float | None = None) -> Frame:
        if self._peer_fd < 0:
            self._take_over_memory()
        frame = super().receive(timeout_s)
        self._extents = frame.extents
        return frame

    def take(self, extents: Sequence[Extent], keep: Callable[[], bool]) -> bool:
        check_lengths(extents, sum(length for _, length in self._extents))
        for source, targets in _pair_up(self._extents, extents):
            if not keep():
                return False
            self._copy(source, targets)
        return keep()

    def close(self) -> None:
        super().close()
        if self._peer_fd >= 0:
            os.close(self._peer_fd)
            self._peer_fd = -1

    def _copy(self, source: int, targets: list[Extent]) -> None:
        view = self._memory.view
        wanted = sum(length for _, length in targets)
        try:
            got = os.preadv(
                self._peer_fd, [view[start : start + length] for start, length in targets], source
            )
        except (OSError, OverflowError) as e:
            raise PeerLost(f"the peer's memory cannot be read: {e}") from e
        if got != wanted:
            raise PeerLost(f"the peer's memory ends before {source + wanted}")

    def _hand_over_memory(self) -> None:
        fd = self._memory.read_only_fd()
        try:
            socket.send_fds(self._sock, [b"\0"], [fd])
        except OSError as e:
            raise PeerLost(f"sending failed (shm): {e}") from e
        finally:
            os.close(fd)

    def _take_over_memory(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        except OSError as e:
            raise PeerLost(f"the peer's memory was not handed over: {e}") from e
        if not data or not fds:
            raise PeerLost("the peer's memory was not handed over")
        self._peer_fd = fds[0]


class ShmListener:
    """Under a random name: a later life is never taken for this one."""

    def __init__(self, memory: Memory, timeouts: Timeouts) -> None:
        self._memory = memory
        self._timeouts = timeouts
        self.address = f"tsukimi-{secrets.token_hex(16)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(_abstract(self.address))
        self._sock.listen(BACKLOG)

    def accept(self) -> ShmConnection:
        return accept(self._sock, lambda sock: ShmConnection(sock, self._memory, self._timeouts))

    def close(self) -> None:
        stop_listening(self._sock)


class ShmTransport:
    name = "shm"

    def __init__(self, memory: Memory, timeouts: Timeouts, host: str = "") -> None:
        self._memory = memory
        self._timeouts = timeouts
        self._host = host

    @classmethod
    def make(cls, setup: Setup) -> ShmTransport | None:
        """None where the own machine is unknown: nobody can be known to share its memory."""
        return cls(setup.memory, setup.timeouts, setup.host) if setup.host else None

    def reaches(self, host: str) -> bool:
        """Only the own machine."""
        return bool(host) and host == self._host

    def register_memory(self) -> None:
        """Nothing to do: peers get the memory's descriptor with each connection."""

    def release_memory(self) -> None:
        """Nothing was registered."""

    def listen(self) -> ShmListener:
        return ShmListener(self._memory, self._timeouts)

    def connect(self, address: str) -> ShmConnection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._timeouts.connect_s)
        try:
            sock.connect(_abstract(address))
            return ShmConnection(sock, self._memory, self._timeouts)
        except (OSError, PeerLost) as e:
            sock.close()
            raise PeerLost(f"no connection to shm {address}: {e}") from e


def _abstract(name: str) -> bytes:
    """Abstract names live in the kernel only and go with the socket."""
    return b"\0" + name.encode()


def _pair_up(sources: Sequence[Extent], targets: Sequence[Extent]) -> Iterator[tuple[int, list[Extent]]]:
    """Copies (source offset, targets) of at most MAX_IOV targets that together move sources into targets."""
    pending = [*reversed(targets)]
    for start, length in sources:
        while length:
            batch: list[Extent] = []
            size = 0
            while size < length and len(batch) < MAX_IOV:
                target, room = pending.pop()
                used = min(room, length - size)
                batch.append((target, used))
                size += used
                if used < room:
                    pending.append((target + used, room - used))
            yield start, batch
            start += size
            length -= size
