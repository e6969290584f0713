"""TCP: payloads follow their frames on the socket."""

from __future__ import annotations

import socket

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.transports.base import PeerLost, Setup, Timeouts
from shared.dataplane.transports.sockets import BACKLOG, SocketConnection, accept, stop_listening

KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A host that vanished without a word is noticed on an idle connection after about 11 s."""


class TcpConnection(SocketConnection):
    """Buffer sizes are left to the kernel's own tuning: fixed ones were no faster."""

    name = "tcp"

    def __init__(self, sock: socket.socket, memory: Memory, timeouts: Timeouts) -> None:
        super().__init__(sock, memory, timeouts)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class TcpListener:
    def __init__(self, bind: str, advertise: str, memory: Memory, timeouts: Timeouts) -> None:
        self._memory = memory
        self._timeouts = timeouts
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._sock = socket.create_server((bind, 0), family=family, backlog=BACKLOG)
        self.address = f"{advertise or bind}:{self._sock.getsockname()[1]}"

    def accept(self) -> TcpConnection:
        return accept(self._sock, lambda sock: TcpConnection(sock, self._memory, self._timeouts))

    def close(self) -> None:
        stop_listening(self._sock)


class TcpTransport:
    name = "tcp"

    def __init__(
        self, memory: Memory, timeouts: Timeouts, bind: str = "127.0.0.1", advertise: str = ""
    ) -> None:
        self._memory = memory
        self._timeouts = timeouts
        self._bind = bind
        self._advertise = advertise

    @classmethod
    def make(cls, setup: Setup) -> TcpTransport:
        return cls(setup.memory, setup.timeouts, setup.bind, setup.advertise)

    def reaches(self, host: str) -> bool:
        """Any machine."""
        return True

    def register_memory(self) -> None:
        """Nothing to do: the kernel copies."""

    def release_memory(self) -> None:
        """Nothing was registered."""

    def listen(self) -> TcpListener:
        return TcpListener(self._bind, self._advertise, self._memory, self._timeouts)

    def connect(self, address: str) -> TcpConnection:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), self._timeouts.connect_s)
        except (OSError, ValueError) as e:
            raise PeerLost(f"no connection to tcp {address}: {e}") from e
        try:
            if (
                sock.getsockname() == sock.getpeername()
            ):  # a dead local port answered by the very socket that calls it
                raise PeerLost("nobody listens")
            return TcpConnection(sock, self._memory, self._timeouts)
        except (OSError, PeerLost) as e:
            sock.close()
            raise PeerLost(f"no connection to tcp {address}: {e}") from e
