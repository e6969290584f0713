"""Generation over NATS: calls in, numbered events out to the reply subject (protocol.generate describes them)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog

from services.gateway.fronts.streaming import chunks_of
from services.gateway.generation.gateway import Gateway
from services.gateway.generation.generation import Generation
from shared.io.bus import Bus, Stream
from shared.protocol import subjects
from shared.protocol.errors import Internal, Invalid, TooLarge, TsukimiError, WireError
from shared.protocol.generate import GenerateCall, GenerateCancel, GenerateEvent
from shared.protocol.ids import REQUEST_ID_CHARS, RequestId, new_request_id
from shared.protocol.wire import Undecoded

SIGN_OF_LIFE: list[Any] = [None]

log = structlog.get_logger(__name__)


class _Caller:
    """The caller of a generation, and whether the bus still finds somebody listening."""

    def __init__(self) -> None:
        self.generation: Generation | None = None

    def gone(self) -> None:
        """The bus says that nobody received an event."""
        if self.generation is not None:
            self.generation.leave("client_left")


class NatsFront:
    """Every failure is told in the last event, also a call or an answer that is too large."""

    def __init__(self, gateway: Gateway, bus: Bus) -> None:
        self._gateway = gateway
        self._bus = bus
        self._running: dict[RequestId, set[Generation]] = {}
        """Generations by the id that the caller gave. Two may have the same id."""

    async def start(self) -> None:
        await self._bus.subscribe(subjects.GENERATE, Undecoded, self._on_call, queue=subjects.QUEUE_GATEWAY)
        await self._bus.subscribe_ordered(subjects.GENERATE_CANCEL, Undecoded, self._on_cancel)

    async def _on_call(self, message: Undecoded) -> Stream:
        caller = _Caller()
        return Stream(self._events(message, caller), caller.gone)

    def _on_cancel(self, message: Undecoded) -> None:
        try:
            cancel = decoded(message, GenerateCancel)
        except Invalid as e:
            log.info("cancel_not_understood", error=e.message)
            return
        for generation in list(self._running.get(cancel.id, ())):
            generation.leave("client_cancelled")

    async def _events(self, message: Undecoded, caller: _Caller) -> AsyncGenerator[Undecoded, None]:
        encode = encoder(message)
        id_: RequestId = ""
        seq = 0
        error: WireError | None = None
        try:
            call: GenerateCall = decoded(message, GenerateCall)
            id_ = call.id[:REQUEST_ID_CHARS] or new_request_id()
            self._require_small(call, message)

            async def body() -> dict[str, Any]:
                return call.body

            running = self._gateway.generate("nats", call.kind, body, id_, always_streams=True)
            async with running as (generation, tracked):
                caller.generation = generation
                with self._listed(id_, generation):
                    async for chunks in chunks_of(generation, tracked, self._gateway.config.keep_alive_s):
                        for chunk in chunks or SIGN_OF_LIFE:
                            yield self._fitting(encode(GenerateEvent(id_, seq, chunk)))
                            seq += 1
        except TsukimiError as e:
            error = Internal("internal error").to_wire() if isinstance(e, Internal) else e.to_wire()
        except Exception:
            log.exception("nats_request_failed", request_id=id_)
            error = Internal("internal error").to_wire()
        yield encode(GenerateEvent(id_, seq, last=True, error=error))

    def _require_small(self, call: GenerateCall, message: Undecoded) -> None:
        if len(call.id) > REQUEST_ID_CHARS:
            raise Invalid(
                f"id: {len(call.id)} characters; at most {REQUEST_ID_CHARS} are allowed", param="id"
            )
        size_bytes, most_bytes = len(message.data), self._gateway.config.max_body_bytes
        if size_bytes > most_bytes:
            raise TooLarge(f"the call of {size_bytes} bytes exceeds the limit of {most_bytes} bytes")

    def _fitting(self, event: Undecoded) -> Undecoded:
        size_bytes, most_bytes = len(event.data), self._bus.max_payload_bytes
        if size_bytes > most_bytes:
            raise TooLarge(
                f"an event of {size_bytes} bytes exceeds the bus's max_payload of {most_bytes} bytes"
            )
        return event

    @contextmanager
    def _listed(self, id_: RequestId, generation: Generation) -> Iterator[None]:
        self._running.setdefault(id_, set()).add(generation)
        try:
            yield
        finally:
            self._running[id_].discard(generation)
            if not self._running[id_]:
                del self._running[id_]


def is_json(message: Undecoded) -> bool:
    """No msgpack map begins with `{` (or white space before it)."""
    return message.data.lstrip()[:1] == b"{"


def decoded(message: Undecoded, type_: Any) -> Any:
    decode: Any = msgspec.json.decode if is_json(message) else msgspec.msgpack.decode
    try:
        return decode(message.data, type=type_)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise Invalid(f"malformed call: {e}") from e


def encoder(message: Undecoded) -> Callable[[GenerateEvent], Undecoded]:
    encode = msgspec.json.encode if is_json(message) else msgspec.msgpack.encode
    return lambda event: Undecoded(encode(event))
