"""Client side of one connection: numbers its streams and reads, and brings each what the peer says about it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from shared.dataplane.transports.base import Connection, PeerLost
from shared.dataplane.wire.connection import FramedConnection
from shared.dataplane.wire.frames import Blocks, Message, PutGranted, ReadGranted, StreamEnded
from shared.dataplane.wire.framing import Frame
from shared.protocol.errors import TsukimiError

T = TypeVar("T")


class Exchange(Protocol):
    """One stream or read. Called from the link's reading thread."""

    def on_frame(self, frame: Frame, connection: Connection) -> None: ...

    def on_lost(self, error: TsukimiError) -> None:
        """The link's threads touch no memory any more."""
        ...


class Caller:
    def __init__(
        self,
        open_: Callable[[], Connection],
        *,
        name: str,
        queue_limit: int,
        stall_s: float,
        on_over: Callable[[], object] = lambda: None,
    ) -> None:
        self.link = FramedConnection(open_, self._on_frame, self._on_lost, name=name, queue_limit=queue_limit)
        self._stall_s = stall_s
        self._on_over = on_over
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._exchanges: dict[int, Exchange] = {}
        self._lost: TsukimiError | None = None

    def add(self, exchange: Exchange) -> int:
        """Its number from now on. On a lost connection it is told so before this returns."""
        number = next(self._numbers)
        with self._lock:
            lost = self._lost
            if lost is None:
                self._exchanges[number] = exchange
        if lost is not None:
            exchange.on_lost(lost)
        return number

    def remove(self, number: int) -> None:
        """Idempotent. Frames for it are dropped from now on."""
        with self._lock:
            self._exchanges.pop(number, None)

    def send(self, message: Message) -> None:
        """Queue a frame without payload; lost with the connection."""
        self.link.post(lambda connection: connection.send(message))

    async def wait(self, done: Future[T], patience_s: float = 0.0) -> T:
        """The result, which must come at the latest when the connection is lost; and lost it is when nothing at all
        moves over it for the stall time. `patience_s`: the peer was allowed that much more time to answer."""
        wrapped = asyncio.wrap_future(done)
        quiet_s = self._stall_s + patience_s
        while not wrapped.done():
            before = self.link.progress
            await asyncio.wait({wrapped}, timeout=quiet_s)
            if not wrapped.done() and self.link.progress == before:
                self.link.sever(PeerLost(f"no answer within {quiet_s} s"))
            quiet_s = self._stall_s
        return wrapped.result()

    def _on_frame(self, frame: Frame, connection: Connection) -> None:
        match frame.message:
            case StreamEnded(stream=number) | PutGranted(stream=number):
                pass
            case ReadGranted(read=number) | Blocks(read=number):
                pass
            case message:
                raise PeerLost(f"{type(message).__name__} is not for a client")
        with self._lock:
            exchange = self._exchanges.get(number)
        if exchange is not None:
            exchange.on_frame(frame, connection)

    def _on_lost(self, error: TsukimiError) -> None:
        with self._lock:
            self._lost = error
            exchanges = list(self._exchanges.values())
            self._exchanges.clear()
        for exchange in exchanges:
            exchange.on_lost(error)
        self._on_over()
