"""The serving side of a bus, the same for every implementation: decode, run handlers within bounds, answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import structlog
from msgspec import Struct

from shared.io.bus import NO_HEADERS, AsyncHandler, Headers, OrderedHandler, Stream, handling
from shared.protocol.errors import Internal, Overloaded, TooLarge, TsukimiError, Unavailable
from shared.protocol.wire import decode, encode

log = structlog.get_logger(__name__)

Respond = Callable[[str, bytes, str], Awaitable[None]]
"""Sends bytes to a reply subject. If nobody listens there, word of that goes to the last subject, if one is given."""
Watch = Callable[[Callable[[], None]], AbstractContextManager[str]]
"""While the block runs, a subject for such words. Each one calls the function."""
Counted = Literal[
    "messages_refused", "messages_undecodable", "handler_bugs", "handlers_cancelled", "replies_too_large", "replies_lost",
]  # fmt: skip
COUNTERS: tuple[Counted, ...] = get_args(Counted)
"""Monotonic totals of every bus."""


class Inbound(Struct, frozen=True):
    """A message as it arrived. `reply` is empty when nobody waits for an answer."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Headers = NO_HEADERS


def too_large(size_bytes: int, max_payload_bytes: int) -> TooLarge:
    return TooLarge(f"a message of {size_bytes} bytes exceeds max_payload of {max_payload_bytes} bytes")


class Dispatcher:
    """Runs the handlers of one connection. Every subscription has a bound of its own: a flood on one starves no other.

    A handler's exception ends here. A TsukimiError is sent to the asker as it is. Any other is logged with its traceback
    and sent as an opaque Internal.
    """

    def __init__(
        self, respond: Respond, watch: Watch, max_payload_bytes: Callable[[], int], max_handlers: int
    ) -> None:
        self._respond = respond
        self._watch = watch
        self._max_payload_bytes = max_payload_bytes
        self._max_handlers = max_handlers
        self._running: set[asyncio.Task[None]] = set()
        self.counters: Counter[Counted] = Counter()

    def concurrent(self, type_: Any, handler: AsyncHandler) -> Callable[[Inbound], None]:
        """A function that takes each message of a subscription and runs the handler concurrently."""
        own: set[asyncio.Task[None]] = set()

        def take(inbound: Inbound) -> None:
            if len(own) >= self._max_handlers:
                self._count("messages_refused", inbound)
                self._start(
                    self._answer(
                        inbound, Overloaded("too many requests at once", retry_after_s=0.1).to_wire()
                    )
                )
                return
            task = self._start(self._handle(inbound, type_, handler))
            own.add(task)
            task.add_done_callback(own.discard)

        return take

    def ordered(self, type_: Any, handler: OrderedHandler) -> Callable[[Inbound], None]:
        """A function that takes each message of a subscription and calls the handler at once, in order."""

        def take(inbound: Inbound) -> None:
            try:
                message = decode(inbound.data, type_)
            except TsukimiError as e:
                self._count("messages_undecodable", inbound, error=str(e))
                return
            try:
                with handling(inbound.headers):
                    handler(message)
            except Exception:
                self.counters["handler_bugs"] += 1
                log.exception("ordered_handler_failed", subject=inbound.subject)

        return take

    async def drain(self, timeout_s: float) -> None:
        """Return when all running handlers have ended and answered. Those that still run at the time-out are cancelled
        and answer Unavailable."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)
        late = list(self._running)
        for task in late:
            task.cancel()
        if late:
            self.counters["handlers_cancelled"] += len(late)
            await asyncio.gather(*late, return_exceptions=True)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _handle(self, inbound: Inbound, type_: Any, handler: AsyncHandler) -> None:
        try:
            message = decode(inbound.data, type_)
        except TsukimiError as e:
            self._count("messages_undecodable", inbound, error=str(e))
            await self._answer(inbound, e.to_wire())
            return
        try:
            with handling(inbound.headers):
                answer = await handler(message)
                if isinstance(answer, Stream):
                    with self._watch(answer.unheard) as word_to:
                        await self._stream(inbound, answer.parts, word_to)
                elif isinstance(answer, AsyncGenerator):
                    await self._stream(inbound, answer)
                else:
                    await self._answer(inbound, answer)
        except TsukimiError as e:
            await self._answer(inbound, e.to_wire())
        except asyncio.CancelledError:
            await self._answer(inbound, Unavailable("shutting down").to_wire())
            raise
        except Exception:
            self.counters["handler_bugs"] += 1
            log.exception("handler_failed", subject=inbound.subject)
            await self._answer(inbound, Internal("internal error").to_wire())

    async def _stream(self, inbound: Inbound, parts: AsyncGenerator[Any, None], word_to: str = "") -> None:
        """Send part after part. Stop at one that cannot be sent, so that the asker never gets a stream with a hole.
        Without an asker no part is made."""
        async with contextlib.aclosing(parts):
            if not inbound.reply:
                return
            async for part in parts:
                if not await self._answer(inbound, part, word_to):
                    return

    async def _answer(self, inbound: Inbound, answer: Any, word_to: str = "") -> bool:
        """Send an answer if somebody waits for one. Returns whether it was sent. Over max_payload it becomes TooLarge."""
        if not inbound.reply:
            return False
        data = b"" if answer is None else encode(answer)
        if len(data) > self._max_payload_bytes():
            self._count("replies_too_large", inbound)
            error = too_large(len(data), self._max_payload_bytes())
            await self._send(inbound, encode(error.to_wire()))
            return False
        return await self._send(inbound, data, word_to)

    async def _send(self, inbound: Inbound, data: bytes, word_to: str = "") -> bool:
        try:
            await self._respond(inbound.reply, data, word_to)
        except TsukimiError as e:
            self._count("replies_lost", inbound, error=str(e))
            return False
        return True

    def _count(self, what: Counted, inbound: Inbound, **more: Any) -> None:
        """Count. Log only the first and every hundredth, so that a flood of messages is no flood of lines."""
        self.counters[what] += 1
        if self.counters[what] % 100 == 1:
            log.warning(
                what, subject=inbound.subject, size_bytes=len(inbound.data), total=self.counters[what], **more
            )
