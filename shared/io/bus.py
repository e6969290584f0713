"""The control bus as services see it. Implementations: io.nats_bus (real), io.memory_bus (in-process, for tests)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

AsyncHandler = Callable[[Any], Awaitable[Any]]
"""Gets a decoded message. What it returns is the reply: a Struct, or an async generator of Structs, each of which is sent
to the reply subject as it comes, maybe in a Stream; None answers an asker with empty bytes. A raised TsukimiError is
sent as WireError. On subjects where others speak too, the type `wire.Undecoded` passes bytes through, both ways."""
OrderedHandler = Callable[[Any], None]


class Stream(Struct, frozen=True):
    """Replies whose maker is told when nobody listens for them any more."""

    parts: AsyncGenerator[Any, None]
    unheard: Callable[[], None]
    """Called, once for every part, when the bus had nobody to give it to. The parts go on until the maker ends them."""


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
        """Encode and send. Raises TooLarge (naming both sizes) over max_payload. While disconnected: buffered, bounded;
        a full buffer raises Overloaded."""
        ...

    async def request(self, subject: str, message: Any, reply: Any, timeout_s: float) -> Any:
        """One reply decoded as `reply`. Raises what a WireError reply says; Unavailable within milliseconds when nobody
        listens or the connection is down; DeadlineExceeded after timeout_s; TooLarge."""
        ...

    async def subscribe(
        self, subject: str, type_: Any, handler: AsyncHandler, *, queue: str = ""
    ) -> Subscription:
        """Run the handler for every message in a task group of this subscription's own, bounded: a slow one delays no
        other. When the group is full, requests are answered Overloaded at once. A message that does not decode is
        answered Invalid, logged, dropped. On return (while connected) messages are already coming."""
        ...

    async def subscribe_ordered(self, subject: str, type_: Any, handler: OrderedHandler) -> Subscription:
        """Call the (non-blocking, synchronous) handler for every message in the order of arrival."""
        ...

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Called with False when the connection is lost and True when it is back and re-subscribed."""
        ...

    async def flush(self) -> None: ...

    async def close(self) -> None:
        """Stop taking messages, let running handlers finish and their replies go out, then disconnect."""
        ...
