"""What every transport gives: connections that carry frames, and pages from one process's memory to another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.wire.frames import Message
from shared.dataplane.wire.framing import Extent, Frame
from shared.protocol.errors import Unavailable


class PeerLost(Unavailable):
    """The connection is over: closed, reset, cut in the middle of a frame, silent for too long, or talking rubbish."""


class Timeouts(Struct, frozen=True):
    connect_s: float = 2.0
    """For the connection and for the handshake, each."""
    stall_s: float = 10.0
    """Without any progress in the middle of a frame or of a send, the peer counts as lost."""


class Setup(Struct, frozen=True):
    """What a transport is made of."""

    memory: Memory
    """The own memory that pages are sent from and received into."""
    timeouts: Timeouts
    host: str = ""
    """The machine that this process is on; empty: unknown."""
    bind: str = "127.0.0.1"
    """Address to listen on."""
    advertise: str = ""
    """Address that peers connect to; empty: `bind`."""


class Connection(Protocol):
    """One peer. `send` belongs to one thread at a time, `receive` and `take` to one (other) thread at a time; `cut` to
    anyone. Everything blocks, and everything raises PeerLost, at the latest `stall_s` after the peer went quiet in the
    middle of something, and at once after `cut`."""

    name: str
    """Of the transport."""

    def send(self, message: Message, extents: Sequence[Extent] = ()) -> None:
        """A frame, with these bytes of the own memory as payload. When it returns, a peer on the same host may still
        read the bytes, until it has answered something that it says only after it took them."""
        ...

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame; what is left of the last one's payload is dropped. Waits for it for ever unless told not to."""
        ...

    def take(self, extents: Sequence[Extent], keep: Callable[[], bool]) -> bool:
        """Put the last frame's payload into these bytes of the own memory, equally long in all. Stops writing, and
        returns False, once keep() has turned false; a keep() that stays true is answered True."""
        ...

    def cut(self) -> None:
        """Every thread in send or receive gets PeerLost now, and so does the peer. Idempotent, from any thread."""
        ...

    def close(self) -> None:
        """Give the descriptors back. Once no thread uses the connection any more. Idempotent."""
        ...


class Listener(Protocol):
    address: str
    """What a peer connects to."""

    def accept(self) -> Connection:
        """The next caller. Raises PeerLost once closed."""
        ...

    def close(self) -> None:
        """A thread in accept gets PeerLost now. Idempotent, from any thread."""
        ...


class Transport(Protocol):
    """One way for frames and pages between two processes. Its name is the scheme of its addresses."""

    name: str

    def reaches(self, host: str) -> bool:
        """Whether a peer on that machine may be reached this way."""
        ...

    def register_memory(self) -> None:
        """Make the own memory known to the device that moves it. Called once, before `listen` and `connect`. Raises
        Invalid if that device is not there."""
        ...

    def release_memory(self) -> None:
        """Undo register_memory, after the last connection is closed. Idempotent."""
        ...

    def listen(self) -> Listener: ...

    def connect(self, address: str) -> Connection:
        """Raises PeerLost when nobody answers there in time."""
        ...
