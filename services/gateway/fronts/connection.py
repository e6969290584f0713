"""One HTTP exchange as raw ASGI: the body in, within its limit; the answer out, to a client that may leave or stall."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.gateway.api.errors import error_object, retry_after, status_of
from services.gateway.generation.generation import Generation
from shared.protocol.errors import Cancelled, TooLarge, TsukimiError
from shared.protocol.ids import REQUEST_ID_CHARS, new_request_id

TRANSPORT = "tsukimi.transport"
"""Scope extension under which the server leaves the connection's transport."""
DISCARD_BODIES = 16
"""Read and discard up to this many times the limit, so that the client receives the 413 and not a reset."""


class Connection:
    def __init__(self, scope: Any, receive: Any, send: Any, stalled_s: float) -> None:
        self.method: str = scope["method"]
        self.started = False
        """Whether the headers have been sent, after which the status cannot change."""
        self._receive = receive
        self._send = send
        self._stalled_s = stalled_s
        self._transport: Any = (scope.get("extensions") or {}).get(TRANSPORT)
        self._given: str = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")

    @property
    def request_id(self) -> str:
        """The client's own id if it is printable and not too long, else a new one."""
        given = self._given
        if not (0 < len(given) <= REQUEST_ID_CHARS and given.isascii() and given.isprintable()):
            self._given = given = new_request_id()
        return given

    # -- in ----------------------------------------------------------------------------------------------------------

    async def read(self, most_bytes: int) -> bytes:
        """Raises TooLarge, and Cancelled if the client leaves."""
        body = bytearray()
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("client_left")
            part = message.get("body", b"")
            size += len(part)
            if size <= most_bytes:
                body += part
            more = message.get("more_body", False)
            if not more and size <= most_bytes:
                return bytes(body)
            if not more or size > DISCARD_BODIES * most_bytes:
                raise TooLarge(
                    f"the body of {'more than ' if more else ''}{size} bytes exceeds the limit of {most_bytes} bytes"
                )

    @asynccontextmanager
    async def watching(self, generation: Generation) -> AsyncIterator[None]:
        """While the block runs, a client that closes the connection ends the generation."""
        watch = asyncio.create_task(self._watch(generation))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, generation: Generation) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        generation.leave("client_left")

    # -- out ---------------------------------------------------------------------------------------------------------

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._say({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Waits while the client's buffers are full. Raises Cancelled if it takes nothing for too long."""
        await self._say({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self.start(status, [*head, *(headers or [])])
        await self.write(data, more=False)

    async def refuse(self, error: TsukimiError) -> None:
        wait_s = retry_after(error)
        headers = [] if wait_s is None else [(b"retry-after", str(wait_s).encode())]
        if isinstance(error, TooLarge):
            headers.append((b"connection", b"close"))  # the rest of the body may still be coming
        await self.answer(status_of(error), error_object(error), headers)

    def close(self) -> None:
        """End the connection after sending what was written."""
        if self._transport is not None:
            self._transport.close()

    async def _say(self, message: dict[str, Any]) -> None:
        if self._transport is not None and not self._transport.get_write_buffer_size():
            await self._send(message)  # nothing waits: the client keeps up, so this takes no time
            return
        try:
            async with asyncio.timeout(self._stalled_s):
                await self._send(message)
        except TimeoutError as e:
            if self._transport is not None:
                self._transport.abort()
            raise Cancelled("client_stalled") from e
