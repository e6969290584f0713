"""The HTTP side: Litestar routes on uvicorn, and a server that lives inside the service's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from litestar import Litestar, Request, Response, asgi, get
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.api.errors import NotFound, UnknownModel, WrongMethod, error_object, status_of
from services.gateway.fronts.connection import TRANSPORT
from services.gateway.fronts.generation_http import GenerationHttp
from services.gateway.fronts.websocket import serve_socket
from services.gateway.generation.gateway import Gateway
from shared.io.config import ConfigError
from shared.protocol.errors import Internal, TsukimiError

log = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IDLE_CONNECTION_S = 75
PROBES = 3
MOST_STALLED_S = 86_400.0
"""Kernels store these settings in 16 or 32 bits."""
SEND_BUFFER_BYTES = 128 << 10
"""The kernel's send buffer for one connection, in bytes. By default it would hold megabytes for a slow reader."""


def routes(gateway: Gateway) -> Litestar:
    generation = GenerationHttp(gateway)

    @asgi("/v1/chat/completions", copy_scope=False)
    async def chat(scope: Scope, receive: Receive, send: Send) -> None:
        await generation.handle("chat", scope, receive, send)

    @asgi("/v1/completions", copy_scope=False)
    async def completions(scope: Scope, receive: Receive, send: Send) -> None:
        await generation.handle("completion", scope, receive, send)

    @asgi("/v1/stream", copy_scope=False)
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await serve_socket(gateway, scope, receive, send)

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for name in sorted(gateway.cluster.models)]}

    @get("/v1/models/{name:str}")
    async def model(request: Request[Any, Any, Any]) -> dict[str, Any]:
        name: str = request.path_params["name"]
        if name not in gateway.cluster.models:
            raise UnknownModel(f"model: {name!r} is not served", param="model")
        return _model(name)

    @get("/live")
    async def live() -> dict[str, Any]:
        return {"status": "alive"}

    @get("/ready")
    async def ready() -> Response[dict[str, Any]]:
        missing = gateway.missing()
        return Response({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)

    @get("/metrics")
    async def metrics() -> Response[bytes]:
        return Response(gateway.metrics.render(), media_type=METRICS_TYPE)

    return Litestar(
        [chat, completions, stream, models, model, live, ready, metrics],
        exception_handlers={TsukimiError: _refuse, HTTPException: _refuse_http, Exception: _refuse_bug},
        openapi_config=None,
        logging_config=None,
    )


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "tsukimi"}


# -- errors ----------------------------------------------------------------------------------------------------------


def _refuse(_: Request[Any, Any, Any], error: TsukimiError) -> Response[dict[str, Any]]:
    return Response(error_object(error), status_code=status_of(error))


def _refuse_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, Any]]:
    match error:
        case NotFoundException():
            return _refuse(request, NotFound(f"no such path: {request.url.path}"))
        case MethodNotAllowedException():
            return _refuse(request, WrongMethod(f"{request.method} is not allowed on {request.url.path}"))
    said = TsukimiError(error.detail)
    return Response(error_object(said), status_code=error.status_code)


def _refuse_bug(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    log.error("http_handler_failed on %s", request.url.path, exc_info=error)
    return _refuse(request, Internal())


# -- the server ------------------------------------------------------------------------------------------------------


class _Protocol(HttpToolsProtocol):
    """Sends small writes at once, and lets handlers reach their connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def eof_received(self) -> None:
        """A client that closes its sending side before the answer is complete has left. Abort: an ordinary close would
        first wait until the client has taken everything."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {TRANSPORT: self.transport}


class HttpServer(uvicorn.Server):
    """Leave signals alone: the service handles them, not the HTTP server."""

    def __init__(self, app: Any, listener: socket.socket, max_body_bytes: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="websockets-sansio",
                ws_max_size=max_body_bytes,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_CONNECTION_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def run_until_closed(self) -> None:
        await self.serve([self._listener])

    def stop(self) -> None:
        self.should_exit = True


def listen(host: str, port: int, stalled_s: float) -> socket.socket:
    """Raises ConfigError if the address cannot be bound. Connections inherit all options set here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        _notice_silence(listener, stalled_s)
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise ConfigError(f"port: {host}:{port} can't be listened on: {e.strerror}", param="port") from e
    listener.setblocking(False)
    return listener


def _notice_silence(listener: socket.socket, stalled_s: float) -> None:
    """Have the kernel end a connection if, for this long, the client acknowledges nothing, keeps its window shut, or
    answers no probe while nothing is sent. Only the kernel notices small writes into a connection that is never read,
    and a machine that is gone."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stalled_s = min(stalled_s, MOST_STALLED_S)
    probe_s = max(1, round(stalled_s / (PROBES + 1)))
    for name, value in (
        ("TCP_USER_TIMEOUT", math.ceil(stalled_s * 1000)),
        ("TCP_KEEPIDLE", probe_s),
        ("TCP_KEEPINTVL", probe_s),
        ("TCP_KEEPCNT", PROBES),
    ):
        if hasattr(socket, name):  # not every system has all of these options
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
