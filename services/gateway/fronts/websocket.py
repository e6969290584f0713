"""/v1/stream: generations over a WebSocket, one after the other.

A request is a JSON text: `kind` ("chat" or "completion") beside the fields of the HTTP body. The answer's messages are
the chunks of an HTTP stream, usage last, then {"done": true, "id": ...}; or {"error": {...}, "status": ...}. The
text {"cancel": true} ends the generation that is running, which answers {"done": true, "cancelled": true}.
"""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import msgspec
import structlog

from services.gateway.api.body import parse_object
from services.gateway.api.errors import WrongMethod, error_object, status_of
from services.gateway.api.request import Kind
from services.gateway.fronts.streaming import chunks_of
from services.gateway.generation.gateway import Gateway
from services.gateway.generation.generation import Generation
from shared.protocol.errors import Cancelled, Internal, Invalid, Overloaded, TsukimiError

log = structlog.get_logger(__name__)

WAITING_MOST = 16
"""Most requests that one socket may queue."""
_encoder = msgspec.json.Encoder()


async def serve_socket(gateway: Gateway, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "websocket":
        await _say_upgrade(send)
        return
    await receive()  # websocket.connect
    await send({"type": "websocket.accept"})
    socket = _Socket(gateway, receive, send)
    reader = asyncio.create_task(socket.read())
    try:
        await socket.serve()
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


class _Socket:
    def __init__(self, gateway: Gateway, receive: Any, send: Any) -> None:
        self._gateway = gateway
        self._receive = receive
        self._send = send
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_MOST + 1)
        """The client's messages; None when it has left."""
        self._running: Generation | None = None

    async def read(self) -> None:
        """Take requests and cancellations while generations run."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            data: bytes = message.get("bytes") or (message.get("text") or "").encode("utf-8", "surrogatepass")
            if _cancels(data):
                if self._running is not None:
                    self._running.leave("client_cancelled")
            elif self._requests.qsize() < WAITING_MOST:
                self._requests.put_nowait(data)
            else:
                error = Overloaded(f"{WAITING_MOST} requests are waiting on this socket", retry_after_s=1.0)
                await self._say(error_object(error) | {"status": status_of(error)})
        if self._running is not None:
            self._running.leave("client_left")
        self._requests.put_nowait(None)

    async def serve(self) -> None:
        while (data := await self._requests.get()) is not None:
            try:
                await self._generate(data)
            except Cancelled as e:
                await self._say({"done": True, "cancelled": True, "reason": e.message})
            except TsukimiError as e:
                await self._say(error_object(e) | {"status": status_of(e)})
            except Exception:
                log.exception("socket_request_failed")
                await self._say(error_object(Internal()) | {"status": 500})

    async def _generate(self, data: bytes) -> None:
        body = parse_object(data)
        kind = _kind(body)

        async def read() -> dict[str, Any]:
            return body

        config = self._gateway.config
        async with self._gateway.generate("websocket", kind, read, always_streams=True) as (
            generation,
            tracked,
        ):
            self._running = generation
            try:
                async for chunks in chunks_of(generation, tracked, config.keep_alive_s):
                    for chunk in chunks:
                        await self._say(chunk)
                await self._say({"done": True, "id": generation.request.id})
            finally:
                self._running = None

    async def _say(self, message: Any) -> None:
        """Waits while the client's buffers are full. Raises Cancelled if it left or takes nothing for too long."""
        text = _encoder.encode(message).decode()
        try:
            async with asyncio.timeout(self._gateway.config.stalled_s):
                await self._send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError) as e:  # TimeoutError is an OSError
            raise Cancelled("client_left") from e


def _cancels(data: bytes) -> bool:
    if len(data) > 256 or b"cancel" not in data:
        return False
    try:
        return bool(msgspec.json.decode(data)["cancel"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


def _kind(body: dict[str, Any]) -> Kind:
    kind = body.pop("kind", None)
    if kind not in get_args(Kind):
        raise Invalid("kind: must be one of " + ", ".join(get_args(Kind)), param="kind")
    return kind  # type: ignore[no-any-return]


async def _say_upgrade(send: Any) -> None:
    data = _encoder.encode(error_object(WrongMethod("/v1/stream is a WebSocket")))
    headers = [(b"content-type", b"application/json"), (b"upgrade", b"websocket")]
    await send({"type": "http.response.start", "status": 426, "headers": headers})
    await send({"type": "http.response.body", "body": data})
