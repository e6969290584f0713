"""What every bus implementation guarantees: bounds, and how it closes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.io.bus import Bus
from shared.protocol.errors import DeadlineExceeded, Overloaded, TooLarge, Unavailable
from tests.support.fakes.bus_house import MAX_PAYLOAD_BYTES, House, Ping, Pong, pong, sized
from tests.support.until import until

# -- bounds ----------------------------------------------------------------------------------------------------------


async def test_a_slow_handler_delays_no_other(house: House) -> None:
    release = asyncio.Event()

    async def wait(ping: Ping) -> Pong:
        if ping.n == 0:
            await release.wait()
        return Pong(ping.n)

    bus = await house.bus()
    await bus.subscribe("svc.wait", Ping, wait)
    slow = asyncio.ensure_future(bus.request("svc.wait", Ping(0), Pong, 60.0))
    for n in range(1, 20):
        assert await bus.request("svc.wait", Ping(n), Pong, 5.0) == Pong(n)
    assert not slow.done()
    release.set()
    assert await slow == Pong(0)


async def test_a_full_subscription_answers_overloaded_and_starves_no_other(house: House) -> None:
    release = asyncio.Event()
    running = 0

    async def wait(_: Ping) -> Pong:
        nonlocal running
        running += 1
        await release.wait()
        return Pong()

    bus = await house.bus(max_handlers=3)
    await bus.subscribe("svc.wait", Ping, wait)
    await bus.subscribe("svc.ping", Ping, pong)
    slow = [asyncio.ensure_future(bus.request("svc.wait", Ping(), Pong, 60.0)) for _ in range(3)]
    await until(lambda: running == 3)
    with pytest.raises(Overloaded) as e:
        await bus.request("svc.wait", Ping(), Pong, 60.0)
    assert e.value.retry_after_s
    assert bus.counters["messages_refused"] == 1
    assert await bus.request("svc.ping", Ping(1), Pong, 5.0) == Pong(2)
    release.set()
    assert await asyncio.gather(*slow) == [Pong()] * 3
    assert await bus.request("svc.wait", Ping(), Pong, 5.0) == Pong()


@pytest.mark.parametrize("size_bytes", [MAX_PAYLOAD_BYTES - 1, MAX_PAYLOAD_BYTES])
async def test_a_payload_up_to_the_bound_passes_both_ways(house: House, size_bytes: int) -> None:
    bus = await house.bus()
    assert bus.max_payload_bytes == MAX_PAYLOAD_BYTES
    got: list[Ping] = []
    await bus.subscribe_ordered("svc.take", Ping, got.append)
    await bus.subscribe("svc.ping", Ping, pong)
    message = sized(Ping, size_bytes)
    await bus.publish("svc.take", message)
    assert await bus.request("svc.ping", message, Pong, 30.0) == Pong(1, message.data)
    await until(lambda: got == [message])


async def test_a_payload_over_the_bound_names_both_sizes(house: House) -> None:
    async def large(_: Ping) -> Any:
        return sized(Pong, MAX_PAYLOAD_BYTES + 1)

    bus = await house.bus()
    await bus.subscribe("svc.ping", Ping, pong)
    await bus.subscribe("svc.large", Ping, large)
    message = sized(Ping, MAX_PAYLOAD_BYTES + 1)
    both = "1048577 bytes exceeds max_payload of 1048576"
    with pytest.raises(TooLarge, match=both):
        await bus.publish("svc.ping", message)
    with pytest.raises(TooLarge, match=both):
        await bus.request("svc.ping", message, Pong, 30.0)
    with pytest.raises(TooLarge, match=both):
        await bus.request("svc.large", Ping(), Pong, 30.0)
    assert await bus.request("svc.ping", Ping(), Pong, 5.0) == Pong(1)


# -- the end ---------------------------------------------------------------------------------------------------------


async def test_close_lets_running_handlers_finish_and_answer(house: House) -> None:
    started, release = asyncio.Event(), asyncio.Event()
    told: list[Ping] = []

    async def wait(ping: Ping) -> Pong:
        started.set()
        await release.wait()
        await server.publish("told", ping)
        return Pong(ping.n + 1)

    server, client = await house.bus(), await house.bus()
    await client.subscribe_ordered("told", Ping, told.append)
    await server.subscribe("svc.wait", Ping, wait)
    asked = asyncio.ensure_future(client.request("svc.wait", Ping(1), Pong, 60.0))
    await started.wait()
    closing = asyncio.ensure_future(server.close())
    await until_unavailable(client, "svc.wait")
    assert not closing.done()
    release.set()
    await closing
    assert await asked == Pong(2)
    await until(lambda: Ping(1) in told)


async def test_close_may_be_repeated_and_nothing_works_afterwards(house: House) -> None:
    bus = await house.bus()
    await bus.close()
    await bus.close()
    assert not bus.connected
    with pytest.raises(Unavailable):
        await bus.publish("news", Ping())
    with pytest.raises(Unavailable):
        await bus.request("news", Ping(), Pong, 5.0)
    with pytest.raises(Unavailable):
        await bus.subscribe("news", Ping, pong)


async def until_unavailable(bus: Bus, subject: str) -> None:
    """Wait until nobody accepts new requests. Requests accepted meanwhile are left to time out."""
    async with asyncio.timeout(20.0):
        while True:
            try:
                await bus.request(subject, Ping(), Pong, 0.05)
            except DeadlineExceeded:
                continue
            except Unavailable:
                return
