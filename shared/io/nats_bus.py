"""The control bus over core NATS. The only module that imports nats; its errors end here.

A lost connection is retried without end, and every subscription comes back with it. What is published meanwhile waits in
a bounded buffer. Requests under way when the connection is lost fail at once with Unavailable.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Literal, get_args

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared.io import dispatch
from shared.io.bus import NO_HEADERS, AsyncHandler, Headers, OrderedHandler, headers_bytes, headers_to_send
from shared.io.dispatch import Dispatcher, Inbound, too_large
from shared.io.nats_errors import translated
from shared.io.replies import Replies, decode_reply
from shared.protocol.errors import DeadlineExceeded, Unavailable
from shared.protocol.wire import encode

log = structlog.get_logger(__name__)

NO_RESPONDERS = "503"
"""Status header of the server's own answer when nobody listens on a request's subject."""
CONNECT_TIMEOUT_S = 2
RETRY_S = 0.25
PING_S = 2
UNANSWERED_PINGS = 3
"""Pings without an answer beyond which the connection counts as lost."""
FLUSH_S = 5
LOG_EVERY_S = 5.0
SETTLE_S = 5.0
"""Seconds after an outage during which a stream without a listener means nothing: listeners may still be reconnecting."""
TURN_MESSAGES = 64
"""Messages taken in a row before their handlers get a turn. Those that need not wait end then, and only those that wait
count against the bound of their subscription."""
INBOX_MESSAGES = 1 << 16
INBOX_BYTES = 64 << 20
"""Most messages of a subscription that wait for the event loop; more are dropped, counted as messages_dropped."""
Counted = Literal["messages_dropped", "bus_errors", "reconnects"]
COUNTERS: tuple[Counted, ...] = get_args(Counted)
"""Monotonic totals of a connection, beside those of dispatch."""


async def connect(
    url: str,
    *,
    name: str,
    max_handlers: int = 1024,
    pending_bytes: int = 8 << 20,
    close_timeout_s: float = 5.0,
) -> NatsBus:
    """Connect. While no server answers, wait and log that. Raises Invalid on a malformed URL.

    `max_handlers` bounds how many handlers of one subscription run at once. `pending_bytes` bounds what waits to be sent.
    """
    bus = NatsBus(max_handlers, close_timeout_s)
    await bus.start(url, name, pending_bytes)
    return bus


class _Client(Client):
    async def flush(self, timeout: int = FLUSH_S) -> None:
        """A round trip after everything pending. The base class sends its PING before what waits to be written, so that
        a drain would end before the server knew of it."""
        await self._flush_pending(force_flush=True)
        await super().flush(timeout)


class NatsBus:
    """See shared.io.bus.Bus. `failed` ends with an exception if the connection is given up for good: a bug, or a server
    that rejects us. A service lets that end its process."""

    def __init__(self, max_handlers: int, close_timeout_s: float) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = _Client()
        self._url = ""
        self._replies = Replies(f"_INBOX.{uuid.uuid4().hex}")
        self._dispatcher = Dispatcher(
            self._respond, self._replies.watch, lambda: self.max_payload_bytes, max_handlers
        )
        self._subscriptions: list[NatsSubscription] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._up = False
        self._closing = False
        self._close_timeout_s = close_timeout_s
        self._counters: Counter[Counted] = Counter()
        self._said_at = 0.0
        self._found_at = -SETTLE_S

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, url: str, name: str, pending_bytes: int) -> None:
        self._url = url
        with translated():
            await self._client.connect(
                servers=[url],
                name=name,
                error_cb=self._on_error,
                disconnected_cb=self._on_lost,
                reconnected_cb=self._on_found,
                closed_cb=self._on_closed,
                connect_timeout=CONNECT_TIMEOUT_S,
                reconnect_time_wait=RETRY_S,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                ping_interval=PING_S,
                max_outstanding_pings=UNANSWERED_PINGS,
                pending_size=pending_bytes,
                flush_timeout=FLUSH_S,
            )
            await self._client.subscribe(f"{self._replies.inbox}.*", cb=self._on_reply)
        self._up = True
        log.info("bus_connected", url=url, max_payload_bytes=self.max_payload_bytes)

    async def stop_listening(self) -> None:
        """End all subscriptions, so that askers learn at once that nobody answers here. Returns when the running handlers
        have answered. Those that still run after `close_timeout_s` are cancelled and answer Unavailable."""
        subscriptions, self._subscriptions = self._subscriptions, []
        await asyncio.gather(*(self._leave(subscription) for subscription in subscriptions))
        await self._dispatcher.drain(self._close_timeout_s)

    async def close(self) -> None:
        """Stop listening, send what is pending, disconnect. Idempotent."""
        if self._closing:
            return
        self._closing = True
        await self.stop_listening()
        await self.flush()
        self._up = False
        try:
            await self._client.close()
        except (nats.errors.Error, OSError) as e:  # there was no connection for what was pending
            log.warning("bus_closed_with_unsent_messages", error=str(e))
        self._replies.fail_all("the bus is closed")

    # -- speaking ----------------------------------------------------------------------------------------------------

    @property
    def max_payload_bytes(self) -> int:
        return self._client.max_payload

    @property
    def connected(self) -> bool:
        return self._up and self._client.is_connected

    @property
    def counters(self) -> dict[str, float]:
        own, handling = self._counters, self._dispatcher.counters
        return {name: own[name] for name in COUNTERS} | {name: handling[name] for name in dispatch.COUNTERS}

    async def publish(self, subject: str, message: Any) -> None:
        await self._publish(subject, self._encode(message), headers=headers_to_send())

    async def request(self, subject: str, message: Any, reply: Any, timeout_s: float) -> Any:
        data = self._encode(message)
        if not self.connected:
            raise Unavailable("the bus is not connected")
        inbox, future = self._replies.open()
        try:
            async with asyncio.timeout(timeout_s):
                await self._publish(subject, data, inbox, headers_to_send())
                answer = await future
        except TimeoutError as e:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:.3g} s") from e
        finally:
            self._replies.close(inbox)
        return decode_reply(answer, reply)

    async def flush(self) -> None:
        """Return once the server has everything published before, or at once while there is no connection."""
        if not self.connected:
            return
        try:
            await self._client.flush(FLUSH_S)
        except (nats.errors.Error, OSError) as e:
            log.warning("bus_flush_failed", error=str(e))

    def _encode(self, message: Any) -> bytes:
        data = encode(message)
        size = len(data) + headers_bytes(headers_to_send())
        if size > self.max_payload_bytes:
            raise too_large(size, self.max_payload_bytes)
        return data

    async def _publish(
        self, subject: str, data: bytes, reply: str = "", headers: Headers = NO_HEADERS
    ) -> None:
        with translated():
            await self._client.publish(subject, data, reply=reply, headers=dict(headers) or None)

    async def _respond(self, reply: str, data: bytes, word_to: str) -> None:
        await self._publish(reply, data, word_to)

    # -- listening ---------------------------------------------------------------------------------------------------

    async def subscribe(
        self, subject: str, type_: Any, handler: AsyncHandler, *, queue: str = ""
    ) -> _Subscription:
        return await self._subscribe(subject, queue, self._dispatcher.concurrent(type_, handler))

    async def subscribe_ordered(self, subject: str, type_: Any, handler: OrderedHandler) -> _Subscription:
        return await self._subscribe(subject, "", self._dispatcher.ordered(type_, handler))

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def _subscribe(self, subject: str, queue: str, take: Callable[[Inbound], None]) -> _Subscription:
        taken = 0

        async def on_message(message: Msg) -> None:
            nonlocal taken
            take(Inbound(message.subject, message.data, message.reply, message.headers or NO_HEADERS))
            taken += 1
            if taken % TURN_MESSAGES == 0:
                await asyncio.sleep(0)

        with translated():
            subscription = await self._client.subscribe(
                subject, queue, on_message, pending_msgs_limit=INBOX_MESSAGES, pending_bytes_limit=INBOX_BYTES
            )
        self._subscriptions.append(subscription)
        await self.flush()
        return _Subscription(lambda: self._drop(subscription))

    async def _drop(self, subscription: NatsSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            await self._leave(subscription)

    async def _leave(self, subscription: Any) -> None:  # Any: the client leaves `drain` untyped
        """Unsubscribe. Messages that the server sent before it knew are still handled."""
        try:
            async with asyncio.timeout(FLUSH_S):
                if self.connected:
                    await subscription.drain()
                else:
                    await subscription.unsubscribe()
        except (
            nats.errors.Error,
            OSError,
        ) as e:  # the connection was lost meanwhile, and the subscription with it
            log.info("bus_unsubscribe_failed", subject=subscription.subject, error=str(e))

    async def _on_reply(self, message: Msg) -> None:
        if not message.data and message.headers and message.headers.get("Status") == NO_RESPONDERS:
            self._replies.fail(message.subject, Unavailable("nobody answers for it"))
            settled = asyncio.get_running_loop().time() - self._found_at >= SETTLE_S
            if self._up and settled:  # word may come before we know that the connection is back
                self._replies.unheard(message.subject)
        else:
            self._replies.deliver(message.subject, message.data)

    # -- what the client tells ---------------------------------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._counters["messages_dropped"] += 1
            if self._counters["messages_dropped"] % 100 == 1:
                log.error(
                    "bus_messages_dropped", subject=error.subject, total=self._counters["messages_dropped"]
                )
            return
        if not isinstance(error, OSError | nats.errors.StaleConnectionError):
            self._counters["bus_errors"] += 1
            log.warning("bus_error", error=repr(error))
            return
        if self._up:  # _on_lost reports the loss itself
            return
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= LOG_EVERY_S:
            self._said_at = now
            log.warning("waiting_for_nats", url=self._url, error=str(error) or repr(error))

    async def _on_lost(self) -> None:
        if not self._up:
            return
        self._up = False
        self._replies.fail_all("the connection was lost")
        if not self._closing:
            log.warning("bus_lost", url=self._url)
            self._tell(False)

    async def _on_found(self) -> None:
        self._up = True
        self._found_at = asyncio.get_running_loop().time()
        self._counters["reconnects"] += 1
        log.info("bus_found", url=self._url)
        self._tell(True)

    async def _on_closed(self) -> None:
        if not self._closing:
            self._fail(Unavailable(f"the connection was ended: {self._client.last_error}"))

    def _tell(self, up: bool) -> None:
        try:
            for callback in self._callbacks:
                callback(up)
        except Exception as bug:  # must not end the client's own task: it would fall silent
            self._fail(bug)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


class _Subscription:
    def __init__(self, leave: Callable[[], Awaitable[None]]) -> None:
        self._leave = leave

    async def unsubscribe(self) -> None:
        """Idempotent."""
        await self._leave()
