"""The control bus as services see it. Implementations: io.nats_bus (real), io.memory_bus (in-process, for tests)."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from msgspec import Struct

from shared.protocol.errors import Invalid

AsyncHandler = Callable[[Any], Awaitable[Any]]
"""Gets a decoded message and returns the reply: a Struct, or an async generator of Structs (perhaps in a Stream), each of
which is sent to the reply subject as it comes. None answers an asker with empty bytes. A raised TsukimiError is sent as
WireError. On subjects that foreign clients use, the type `wire.Undecoded` passes bytes through in both directions."""
OrderedHandler = Callable[[Any], None]


class Stream(Struct, frozen=True):
    """Replies whose maker is told when nobody listens to them any more."""

    parts: AsyncGenerator[Any, None]
    unheard: Callable[[], None]
    """Called for every part that the bus could give to nobody. The parts go on until the maker ends them."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    @property
    def max_payload_bytes(self) -> int: ...

    @property
    def connected(self) -> bool: ...

    @property
    def counters(self) -> Mapping[str, float]:
        """Monotonic totals of what went wrong: messages_undecodable, messages_refused, replies_lost, ..."""
        ...

    async def publish(self, subject: str, message: Any) -> None:
        """Encode and send. Raises TooLarge (naming both sizes) over max_payload. While disconnected, messages wait in a
        bounded buffer; if it is full, raises Overloaded."""
        ...

    async def request(self, subject: str, message: Any, reply: Any, timeout_s: float) -> Any:
        """Ask, and return the reply decoded as `reply`. Raises the error in a WireError reply; Unavailable within
        milliseconds if nobody listens or the connection is down; DeadlineExceeded after timeout_s; TooLarge."""
        ...

    async def subscribe(
        self, subject: str, type_: Any, handler: AsyncHandler, *, queue: str = ""
    ) -> Subscription:
        """Run the handler for every message in a bounded task group of this subscription: a slow handler delays no
        other. If the group is full, requests are answered Overloaded at once. A message that does not decode is logged
        and answered Invalid. On return, while connected, the subscription is in effect."""
        ...

    async def subscribe_ordered(self, subject: str, type_: Any, handler: OrderedHandler) -> Subscription:
        """Call the handler, which is synchronous and does not block, for every message in the order of arrival."""
        ...

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Called with False when the connection is lost and True when it is back and re-subscribed."""
        ...

    async def flush(self) -> None: ...

    async def close(self) -> None:
        """Stop taking messages, let running handlers finish and send their replies, then disconnect."""
        ...


# -- headers -----------------------------------------------------------------------------------------------------------

Headers = Mapping[str, str]
"""What concerns a message's way and not its content, such as a trace context or a credential. Nothing is passed on by
itself: a handler that wants its own messages to carry a header says so."""
NO_HEADERS: Headers = {}
HEADERS_MOST_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9-]+")
_received: ContextVar[Headers] = ContextVar("received_headers", default=NO_HEADERS)
_sent: ContextVar[Headers] = ContextVar("sent_headers", default=NO_HEADERS)


def received_headers() -> Headers:
    """In a handler: the headers of the message that it handles. Elsewhere: none."""
    return _received.get()


def headers_to_send() -> Headers:
    """For implementations of the bus: the headers of what is sent now."""
    return _sent.get()


@contextmanager
def sent_headers(headers: Headers) -> Iterator[None]:
    """Within the block, published messages and requests carry these headers; replies do not. Blocks nest and add up.

    Raises Invalid for a name or a value that cannot travel, and for headers of more than HEADERS_MOST_BYTES in all."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or not value.isprintable() or value != value.strip():
            raise Invalid(f"{name!r}: {value!r} cannot be a header", param="headers")
    both = {**_sent.get(), **headers}
    if headers_bytes(both) > HEADERS_MOST_BYTES:
        raise Invalid(f"headers of more than {HEADERS_MOST_BYTES} bytes", param="headers")
    token = _sent.set(both)
    try:
        yield
    finally:
        _sent.reset(token)


@contextmanager
def handling(headers: Headers) -> Iterator[None]:
    """For implementations of the bus: a handler runs within the block, with these as its message's headers.

    Headers of whoever sent the message in this process do not reach what the handler sends."""
    received, sent = _received.set(headers), _sent.set(NO_HEADERS)
    try:
        yield
    finally:
        _received.reset(received)
        _sent.reset(sent)


def headers_bytes(headers: Headers) -> int:
    """What the headers add to a message on the wire."""
    if not headers:
        return 0
    return 16 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
