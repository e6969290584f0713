"""A bus inside one process, with the guarantees of the real one and no socket. For tests and single-process tools.

Messages are encoded and decoded as on the wire, and arrive in later turns of the event loop, never inside publish.
A `fate` may drop, delay or repeat them, and the broker may be stopped and started, as happens in networks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from shared.io.bus import AsyncHandler, OrderedHandler, headers_bytes, headers_to_send
from shared.io.dispatch import COUNTERS, Dispatcher, Inbound, too_large
from shared.io.replies import Replies, decode_reply
from shared.protocol.errors import DeadlineExceeded, Overloaded, Unavailable
from shared.protocol.wire import encode

Fate = Callable[[str, bytes], Sequence[float]]
"""Gets subject and bytes of a message. Returns the delay, in seconds, of each copy that arrives; none: it is lost."""


def matches(pattern: str, subject: str) -> bool:
    """NATS subject matching: `*` is one token, a last `>` is one or more."""
    want, got = pattern.split("."), subject.split(".")
    if want[-1] == ">":
        return len(got) >= len(want) and all(w in ("*", g) for w, g in zip(want[:-1], got, strict=False))
    return len(want) == len(got) and all(w in ("*", g) for w, g in zip(want, got, strict=True))


class MemorySubscription:
    def __init__(
        self, broker: MemoryBroker, pattern: str, queue: str, take: Callable[[Inbound], None]
    ) -> None:
        self.pattern = pattern
        self.queue = queue
        self.open = True
        self._broker = broker
        self._take = take

    def deliver(self, inbound: Inbound) -> None:
        if self.open:
            self._take(inbound)

    async def unsubscribe(self) -> None:
        self.open = False
        self._broker.subscriptions.pop(self, None)


class MemoryBroker:
    """The broker of memory buses. Belongs to one event loop."""

    def __init__(self, *, max_payload_bytes: int = 1 << 20, fate: Fate | None = None) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.fate = fate
        self.running = True
        self.subscriptions: dict[MemorySubscription, None] = {}
        self._buses: list[MemoryBus] = []
        self._turn = 0

    def connect(self, *, name: str = "", max_handlers: int = 1024, pending_bytes: int = 8 << 20) -> MemoryBus:
        bus = MemoryBus(self, f"_INBOX.{name}{len(self._buses)}", max_handlers, pending_bytes)
        self._buses.append(bus)
        return bus

    def stop(self) -> None:
        """Every connection is lost."""
        self.running = False
        for bus in self._buses:
            bus.connection_changed(False)

    def start(self) -> None:
        """Every connection is back, and what was published meanwhile is sent."""
        self.running = True
        for bus in self._buses:
            bus.connection_changed(True)

    def route(self, message: Inbound) -> bool:
        """Deliver to every plain subscription and to one of each queue group. Returns whether anybody listened."""
        plain: list[MemorySubscription] = []
        groups: dict[str, list[MemorySubscription]] = {}
        for subscription in self.subscriptions:
            if matches(subscription.pattern, message.subject):
                into = groups.setdefault(subscription.queue, []) if subscription.queue else plain
                into.append(subscription)
        self._turn += 1
        takers = plain + [members[self._turn % len(members)] for members in groups.values()]
        loop = asyncio.get_running_loop()
        for delay_s in (0.0,) if self.fate is None else self.fate(message.subject, message.data):
            for taker in takers:
                if delay_s > 0:
                    loop.call_later(delay_s, taker.deliver, message)
                else:
                    loop.call_soon(taker.deliver, message)
        return bool(takers)


class MemoryBus:
    """See shared.io.bus.Bus."""

    def __init__(self, broker: MemoryBroker, inbox: str, max_handlers: int, pending_bytes: int) -> None:
        self._broker = broker
        self._replies = Replies(inbox)
        self._dispatcher = Dispatcher(
            self._respond, self._replies.watch, lambda: broker.max_payload_bytes, max_handlers
        )
        self._subscriptions: list[MemorySubscription] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._pending: deque[Inbound] = deque()
        self._pending_bytes = 0
        self._max_pending_bytes = pending_bytes
        self._closed = False
        take = MemorySubscription(
            broker, f"{inbox}.*", "", lambda m: self._replies.deliver(m.subject, m.data)
        )
        broker.subscriptions[take] = None
        self._inbox = take

    @property
    def max_payload_bytes(self) -> int:
        return self._broker.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self._broker.running and not self._closed

    @property
    def counters(self) -> dict[str, float]:
        return {name: self._dispatcher.counters[name] for name in COUNTERS}

    async def publish(self, subject: str, message: Any) -> None:
        self._publish(Inbound(subject, self._encode(message), headers=headers_to_send()))

    async def request(self, subject: str, message: Any, reply: Any, timeout_s: float) -> Any:
        data = self._encode(message)
        if not self.connected:
            raise Unavailable("the bus is not connected")
        inbox, future = self._replies.open()
        try:
            if not self._broker.route(Inbound(subject, data, inbox, headers_to_send())):
                raise Unavailable(f"nobody answers on {subject}")
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError as e:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:.3g} s") from e
        finally:
            self._replies.close(inbox)
        return decode_reply(answer, reply)

    async def subscribe(
        self, subject: str, type_: Any, handler: AsyncHandler, *, queue: str = ""
    ) -> MemorySubscription:
        return self._add(subject, queue, self._dispatcher.concurrent(type_, handler))

    async def subscribe_ordered(
        self, subject: str, type_: Any, handler: OrderedHandler
    ) -> MemorySubscription:
        return self._add(subject, "", self._dispatcher.ordered(type_, handler))

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def flush(self) -> None:
        """Return when everything published before has arrived, except delayed copies."""
        arrived = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(arrived.set_result, None)
        await arrived

    async def close(self, timeout_s: float = 5.0) -> None:
        if self._closed:
            return
        for subscription in self._subscriptions:
            self._broker.subscriptions.pop(subscription, None)
        await self.flush()  # what is already on its way is still handled
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._dispatcher.drain(timeout_s)
        self._closed = True
        await self._inbox.unsubscribe()
        self._replies.fail_all("the bus is closed")

    def connection_changed(self, up: bool) -> None:
        """The broker says whether the connection is up."""
        if self._closed:
            return
        if not up:
            self._replies.fail_all("the connection was lost")
        while up and self._pending:
            self._route(self._pending.popleft())
        self._pending_bytes = sum(len(m.data) for m in self._pending)
        for callback in self._callbacks:
            callback(up)

    def _encode(self, message: Any) -> bytes:
        data = encode(message)
        size = len(data) + headers_bytes(headers_to_send())
        if size > self.max_payload_bytes:
            raise too_large(size, self.max_payload_bytes)
        return data

    def _publish(self, message: Inbound) -> None:
        if self._closed:
            raise Unavailable("the bus is closed")
        if self._broker.running:
            self._route(message)
        elif self._pending_bytes + len(message.data) > self._max_pending_bytes:
            raise Overloaded("the bus is not connected and its buffer is full", retry_after_s=0.5)
        else:
            self._pending.append(message)
            self._pending_bytes += len(message.data)

    def _route(self, message: Inbound) -> None:
        if not self._broker.route(message) and message.reply:
            asyncio.get_running_loop().call_soon(self._replies.unheard, message.reply)

    async def _respond(self, reply: str, data: bytes, word_to: str) -> None:
        self._publish(Inbound(reply, data, word_to))

    def _add(self, subject: str, queue: str, take: Callable[[Inbound], None]) -> MemorySubscription:
        if self._closed:
            raise Unavailable("the bus is closed")
        subscription = MemorySubscription(self._broker, subject, queue, take)
        self._broker.subscriptions[subscription] = None
        self._subscriptions.append(subscription)
        return subscription
