"""What only the memory bus can do; the rest is in tests/contract/test_bus.py."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import Struct

from shared.io.memory_bus import MemoryBroker, matches
from shared.protocol.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.support.worlds.virtual_time import run


class Ping(Struct, frozen=True, tag="ping"):
    n: int = 0
    data: bytes = b""


async def echo(ping: Ping) -> Ping:
    return ping


def test_an_outage_buffers_what_is_published_and_fails_what_is_asked() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        bus = broker.connect(pending_bytes=5000)
        got: list[int] = []
        states: list[bool] = []
        bus.on_connection(states.append)
        await bus.subscribe_ordered("count", Ping, lambda m: got.append(m.n))
        await bus.subscribe("never", Ping, lambda _: asyncio.sleep(3600))
        asked = asyncio.ensure_future(bus.request("never", Ping(), Ping, 3600))
        await asyncio.sleep(1)
        broker.stop()
        with pytest.raises(Unavailable):
            await asked
        with pytest.raises(Unavailable):
            await bus.request("never", Ping(), Ping, 3600)
        for n in range(4):
            await bus.publish("count", Ping(n, bytes(1000)))
        with pytest.raises(Overloaded):
            await bus.publish("count", Ping(4, bytes(1000)))
        await asyncio.sleep(1)
        assert got == []
        broker.start()
        await bus.flush()
        assert got == [0, 1, 2, 3]
        assert states == [False, True]

    run(main())


def test_fate_drops_delays_and_repeats() -> None:
    fates = {0: (), 1: (5.0,), 2: (0.0, 0.0, 2.0)}

    async def main() -> None:
        broker = MemoryBroker(fate=lambda subject, _: fates[int(subject[-1])])
        bus = broker.connect()
        got: list[tuple[float, int]] = []
        loop = asyncio.get_running_loop()
        await bus.subscribe_ordered("count.*", Ping, lambda m: got.append((loop.time(), m.n)))
        for n in range(3):
            await bus.publish(f"count.{n}", Ping(n))
        await asyncio.sleep(10)
        assert got == [(0.0, 2), (0.0, 2), (2.0, 2), (5.0, 1)]

    run(main())


def test_a_lost_reply_is_a_passed_deadline() -> None:
    async def main() -> None:
        broker = MemoryBroker(fate=lambda subject, _: () if subject.startswith("_INBOX") else (0.0,))
        bus = broker.connect()
        await bus.subscribe("svc", Ping, echo)
        with pytest.raises(DeadlineExceeded):
            await bus.request("svc", Ping(), Ping, 30.0)
        assert asyncio.get_running_loop().time() == 30.0

    run(main())


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True), ("a.b", "a", False), ("a", "a.b", False), ("*", "a", True), ("*", "a.b", False),
        ("a.*.c", "a.x.c", True), ("a.*.c", "a.x.y.c", False), (">", "a.b.c", True), ("a.>", "a", False),
        ("a.*.>", "a.b.c.d", True), ("a.*.>", "a.b", False), ("a.>", "b.c", False),
    ],
)  # fmt: skip
def test_matching(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected
