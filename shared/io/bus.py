"""The control bus as services see it. Implementations: io.nats_bus (real), io.memory_bus (in-process, for tests)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

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
