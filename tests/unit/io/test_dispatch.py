from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from msgspec import Struct

from shared.io.dispatch import Dispatcher, Inbound
from shared.io.replies import Replies
from shared.protocol.errors import Overloaded, Unavailable, WireError
from shared.protocol.wire import decode, encode
from tests.support.worlds.virtual_time import run


class Ask(Struct, frozen=True, tag="ask"):
    n: int


class Part(Struct, frozen=True, tag="part"):
    n: int
    data: bytes = b""


class Wire:
    """What was sent to reply subjects; refuses from the message `full_at` on."""

    def __init__(self, full_at: int = 1 << 30) -> None:
        self.sent: list[Any] = []
        self._full_at = full_at

    async def respond(self, reply: str, data: bytes, word_to: str) -> None:
        assert reply == "inbox"
        if len(self.sent) >= self._full_at:
            raise Overloaded("buffer full")
        self.sent.append(decode(data, Part | WireError))

    def dispatcher(self) -> Dispatcher:
        return Dispatcher(self.respond, Replies("word").watch, lambda: 1000, max_handlers=2)


def ask(n: int) -> Inbound:
    return Inbound("svc", encode(Ask(n)), "inbox")


def counting(closed: list[str], size_at: int = -1) -> Any:
    async def handler(message: Ask) -> AsyncGenerator[Part, None]:
        async def parts() -> AsyncGenerator[Part, None]:
            try:
                for n in range(message.n):
                    await asyncio.sleep(1.0)
                    yield Part(n, bytes(2000 if n == size_at else 0))
                if message.n == 5:
                    raise Unavailable("five")
            finally:
                closed.append("closed")

        return parts()

    return handler


def stream(wire: Wire, n: int, **options: int) -> None:
    async def main() -> None:
        dispatcher = wire.dispatcher()
        dispatcher.concurrent(Ask, counting(closed, **options))(ask(n))
        await dispatcher.drain(3600.0)

    closed: list[str] = []
    run(main())
    assert closed == ["closed"]


def test_every_part_of_a_stream_is_sent() -> None:
    stream(wire := Wire(), 3)
    assert wire.sent == [Part(0), Part(1), Part(2)]


def test_an_error_ends_a_stream() -> None:
    stream(wire := Wire(), 5)
    assert wire.sent[:-1] == [Part(n) for n in range(5)]
    assert wire.sent[-1].code == "unavailable"


def test_a_stream_that_nobody_asked_for_is_not_begun() -> None:
    async def parts() -> AsyncGenerator[Part, None]:
        began.append(True)
        yield Part(0)

    async def handler(_: Ask) -> AsyncGenerator[Part, None]:
        return parts()

    async def main() -> None:
        dispatcher = wire.dispatcher()
        dispatcher.concurrent(Ask, handler)(Inbound("svc", encode(Ask(1))))
        await dispatcher.drain(60.0)

    began: list[bool] = []
    wire = Wire()
    run(main())
    assert (began, wire.sent) == ([], [])


def test_a_part_that_cannot_be_sent_ends_the_stream() -> None:
    stream(wire := Wire(full_at=2), 100)
    assert wire.sent == [Part(0), Part(1)]


def test_a_part_over_the_bound_becomes_an_error_and_the_last() -> None:
    stream(wire := Wire(), 100, size_at=2)
    assert wire.sent[:-1] == [Part(0), Part(1)]
    assert wire.sent[-1].code == "too_large"


def test_handlers_that_outlast_the_drain_are_cancelled_and_say_so() -> None:
    async def main() -> None:
        dispatcher = wire.dispatcher()
        take = dispatcher.concurrent(Ask, lambda _: asyncio.sleep(3600))
        take(ask(0))
        take(Inbound("svc", encode(Ask(1))))
        await dispatcher.drain(5.0)
        assert asyncio.get_running_loop().time() == 5.0
        assert dispatcher.counters["handlers_cancelled"] == 2

    wire = Wire()
    run(main())
    assert [part.code for part in wire.sent] == ["unavailable"]


def test_the_bound_frees_up_when_a_handler_ends() -> None:
    async def main() -> None:
        dispatcher = wire.dispatcher()
        take = dispatcher.concurrent(Ask, handler)
        for n in range(3):
            take(ask(n))
        await asyncio.sleep(2.0)
        take(ask(3))
        await dispatcher.drain(60.0)

    async def handler(message: Ask) -> Part:
        await asyncio.sleep(1.0)
        return Part(message.n)

    wire = Wire()
    run(main())
    assert [part.n if isinstance(part, Part) else part.code for part in wire.sent] == ["overloaded", 0, 1, 3]


def test_a_lost_reply_is_counted_and_hurts_nobody() -> None:
    async def main() -> None:
        dispatcher = wire.dispatcher()

        async def handler(message: Ask) -> Part:
            return Part(message.n)

        dispatcher.concurrent(Ask, handler)(ask(1))
        await dispatcher.drain(60.0)
        assert dispatcher.counters == {"replies_lost": 1}

    wire = Wire(full_at=0)
    run(main())
