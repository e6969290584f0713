"""A transport: sockets in the file system, for processes of one machine that must not see each other's memory.

tsukimi up --set prefill.transports=tests.examples.transport:UnixTransport --set decode.transports=...
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from shared.dataplane.transports.base import PeerLost, Setup
from shared.dataplane.transports.sockets import BACKLOG, SocketConnection, accept, stop_listening


class UnixConnection(SocketConnection):
    name = "unix"


class UnixListener:
    """Listens on a path that nobody but the own user can reach, and removes it at the end."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._folder = tempfile.TemporaryDirectory(prefix="tsukimi-")
        self.address = str(Path(self._folder.name) / "socket")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(self.address)
        self._sock.listen(BACKLOG)

    def accept(self) -> UnixConnection:
        return accept(self._sock, lambda sock: UnixConnection(sock, self._setup.memory, self._setup.timeouts))

    def close(self) -> None:
        stop_listening(self._sock)
        self._folder.cleanup()


class UnixTransport:
    """Implements dataplane.transports.base.Transport."""

    name = "unix"

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @classmethod
    def make(cls, setup: Setup) -> UnixTransport:
        return cls(setup)

    def reaches(self, host: str) -> bool:
        """Only the own machine has the path."""
        return bool(host) and host == self._setup.host

    def register_memory(self) -> None:
        """Nothing to do: the kernel copies."""

    def release_memory(self) -> None:
        """Nothing was registered."""

    def listen(self) -> UnixListener:
        return UnixListener(self._setup)

    def connect(self, address: str) -> UnixConnection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._setup.timeouts.connect_s)
        try:
            sock.connect(address)
            return UnixConnection(sock, self._setup.memory, self._setup.timeouts)
        except OSError as e:
            sock.close()
            raise PeerLost(f"no connection to unix {address}: {e}") from e
