"""POST /v1/chat/completions and /v1/completions as raw ASGI, streamed or whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from services.gateway.api.answer import Update
from services.gateway.api.body import parse_object
from services.gateway.api.errors import WrongMethod
from services.gateway.api.openai_responses import Answers, merge
from services.gateway.api.request import Kind
from services.gateway.fronts import sse
from services.gateway.fronts.connection import Connection
from services.gateway.fronts.streaming import chunks_of
from services.gateway.generation.gateway import Gateway
from services.gateway.generation.generation import Generation
from services.gateway.generation.metrics.request_metrics import Tracked
from shared.protocol.errors import Cancelled, Internal, TsukimiError

log = structlog.get_logger(__name__)


class GenerationHttp:
    """A stream's headers go out with its first chunk or sign of life. A failure before that has an HTTP error status. A
    later failure is an error event and the end of the connection. Every stream ends in one of these or in [DONE]."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._config = gateway.config

    async def handle(self, kind: Kind, scope: Any, receive: Any, send: Any) -> None:
        connection = Connection(scope, receive, send, self._config.stalled_s)
        try:
            if connection.method != "POST":
                raise WrongMethod(f"{connection.method} is not allowed here; use POST")
            await self._generate(kind, connection)
        except Cancelled:
            if connection.started:
                connection.close()
            else:
                await connection.refuse(Cancelled("the request was cancelled"))
        except TsukimiError as e:
            await self._fail(connection, e)
        except Exception:
            log.exception("http_request_failed", request_id=connection.request_id)
            await self._fail(connection, Internal())

    async def _generate(self, kind: Kind, connection: Connection) -> None:
        async def body() -> Mapping[str, Any]:
            return parse_object(await connection.read(self._config.max_body_bytes))

        running = self._gateway.generate("http", kind, body, connection.request_id)
        async with running as (generation, tracked), connection.watching(generation):
            if generation.request.stream:
                await self._stream(connection, generation, tracked)
            else:
                await self._answer(connection, generation, tracked)

    async def _stream(self, connection: Connection, generation: Generation, tracked: Tracked) -> None:
        async for chunks in chunks_of(generation, tracked, self._config.keep_alive_s):
            if not connection.started:
                await connection.start(200, sse.HEADERS)
            await connection.write(sse.data(chunks) if chunks else sse.KEEP_ALIVE)
        await connection.write(sse.DONE, more=False)

    async def _answer(self, connection: Connection, generation: Generation, tracked: Tracked) -> None:
        whole: dict[int, Update] = {}
        while not generation.ended:
            updates = await generation.take(self._config.keep_alive_s)
            if any(update.text for update in updates):
                tracked.text_sent()
            merge(updates, whole)
        answer = Answers(generation.request, generation.text).whole(whole.values(), generation.usage)
        await connection.answer(200, answer)

    async def _fail(self, connection: Connection, error: TsukimiError) -> None:
        try:
            if connection.started:
                await connection.write(sse.error(error), more=False)
                connection.close()
            else:
                await connection.refuse(error)
        except Cancelled:
            log.info("client_gone_before_its_error", request_id=connection.request_id)
