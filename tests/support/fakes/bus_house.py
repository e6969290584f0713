"""Both bus implementations behind one interface, and messages to send over them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from msgspec import Struct

from shared.io.bus import Bus
from shared.io.memory_bus import MemoryBroker
from shared.io.nats_bus import connect
from shared.protocol.wire import encode
from tests.support.processes.nats import nats_server

MAX_PAYLOAD_BYTES = 1 << 20


class Ping(Struct, frozen=True, tag="ping"):
    n: int = 0
    data: bytes = b""


class Pong(Struct, frozen=True, tag="pong"):
    n: int = 0
    data: bytes = b""


class Other(Struct, frozen=True, tag="other"):
    """Does not decode as a Ping."""


class House:
    """Opens buses that can talk to each other."""

    def __init__(self, open_bus: Callable[..., Awaitable[Bus]]) -> None:
        self._open = open_bus
        self._buses: list[Bus] = []

    async def bus(self, **options: Any) -> Bus:
        bus = await self._open(name=f"bus-{len(self._buses)}", **options)
        self._buses.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


async def pong(ping: Ping) -> Pong:
    return Pong(ping.n + 1, ping.data)


def sized(type_: type[Any], size_bytes: int) -> Any:
    """A message of exactly `size_bytes` bytes."""
    overhead = len(encode(type_(data=bytes(size_bytes)))) - size_bytes
    message = type_(data=bytes(size_bytes - overhead))
    assert len(encode(message)) == size_bytes
    return message


@contextlib.asynccontextmanager
async def memory_house() -> AsyncIterator[House]:
    broker = MemoryBroker(max_payload_bytes=MAX_PAYLOAD_BYTES)

    async def open_bus(**options: Any) -> Bus:
        return broker.connect(**options)

    house = House(open_bus)
    yield house
    await house.close()


@contextlib.asynccontextmanager
async def nats_house() -> AsyncIterator[House]:
    async with nats_server() as server:

        async def open_bus(**options: Any) -> Bus:
            return await connect(server.url, **options)

        house = House(open_bus)
        yield house
        await house.close()
