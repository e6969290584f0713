"""The NATS bus without its server: before the server starts, while it is down, and after it is back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import structlog
from msgspec import Struct

import shared.io.nats_bus as nats_bus
from shared.io.nats_bus import NatsBus, connect
from shared.protocol.errors import Invalid, Overloaded, Unavailable
from tests.support.processes.nats import NatsServer, nats_server
from tests.support.until import until


class Ping(Struct, frozen=True, tag="ping"):
    n: int = 0
    data: bytes = b""


async def echo(ping: Ping) -> Ping:
    return ping


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as server:
        yield server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await connect(server.url, name="bus", pending_bytes=10_000)
    yield bus
    await bus.close()


async def lose(server: NatsServer, bus: NatsBus, *, kill: bool = False) -> None:
    await asyncio.to_thread(server.kill if kill else server.stop)
    await until(lambda: not bus.connected)


async def find(server: NatsServer, *buses: NatsBus) -> None:
    server.start()
    await until(lambda: all(bus.connected for bus in buses))


async def test_a_bus_opened_before_its_server_waits_and_says_so(server: NatsServer) -> None:
    await asyncio.to_thread(server.stop)
    with structlog.testing.capture_logs() as lines:
        connecting = asyncio.ensure_future(connect(server.url, name="early"))
        await until(lambda: any(line["event"] == "waiting_for_nats" for line in lines))
        await asyncio.sleep(0.6)
        assert not connecting.done()
        assert len([line for line in lines if line["event"] == "waiting_for_nats"]) == 1
        server.start()
        bus = await connecting
    assert bus.connected
    await bus.subscribe("svc", Ping, echo)
    assert await bus.request("svc", Ping(1), Ping, 5.0) == Ping(1)
    await bus.close()


async def test_a_malformed_url_is_invalid_at_once() -> None:
    with pytest.raises(Invalid):
        await connect("nats://", name="bad")


@pytest.mark.parametrize("kill", [False, True])
async def test_after_an_outage_of_3_seconds_everything_is_subscribed_again(
    server: NatsServer, bus: NatsBus, kill: bool
) -> None:
    other = await connect(server.url, name="other")
    states: list[bool] = []
    ordered: list[int] = []
    bus.on_connection(states.append)
    await bus.subscribe("svc", Ping, echo, queue="q")
    await bus.subscribe_ordered("count", Ping, lambda m: ordered.append(m.n))
    left = await bus.subscribe_ordered("count", Ping, lambda m: ordered.append(-1))
    await lose(server, bus, kill=kill)
    await until(
        lambda: states and not other.connected
    )  # the callback comes shortly after the connection is lost
    assert states == [False]
    await left.unsubscribe()
    for n in range(10):
        await bus.publish("count", Ping(n))
    await asyncio.sleep(3.0)
    await find(server, bus, other)
    assert states == [False, True]
    for n in range(10, 20):
        await bus.publish("count", Ping(n))
    await until(lambda: len(ordered) == 20)
    assert ordered == list(range(20))
    assert await other.request("svc", Ping(5), Ping, 5.0) == Ping(5)
    assert bus.counters["reconnects"] == 1
    await other.close()


async def test_requests_under_way_and_new_ones_fail_at_once_when_the_connection_is_lost(
    server: NatsServer, bus: NatsBus
) -> None:
    started = asyncio.Event()

    async def never(_: Ping) -> Ping:
        started.set()
        await asyncio.sleep(3600)
        return Ping()

    await bus.subscribe("svc", Ping, never)
    asked = asyncio.ensure_future(bus.request("svc", Ping(), Ping, 3600.0))
    await started.wait()
    await lose(server, bus, kill=True)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asked, 10.0)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(bus.request("svc", Ping(), Ping, 3600.0), 10.0)
    bus._close_timeout_s = 0.05  # the handler above never ends by itself


async def test_what_is_published_while_away_is_bounded(server: NatsServer, bus: NatsBus) -> None:
    await lose(server, bus)
    for n in range(9):
        await bus.publish("news", Ping(n, bytes(1000)))
    with pytest.raises(Overloaded) as e:
        await bus.publish("news", Ping(9, bytes(1000)))
    assert e.value.retry_after_s


async def test_a_subscription_made_while_away_works_when_the_server_is_back(
    server: NatsServer, bus: NatsBus
) -> None:
    await lose(server, bus)
    await bus.subscribe("svc", Ping, echo)
    await find(server, bus)
    assert await bus.request("svc", Ping(3), Ping, 5.0) == Ping(3)


async def test_close_while_away_does_not_wait_for_the_server(server: NatsServer, bus: NatsBus) -> None:
    await bus.subscribe("svc", Ping, echo)
    await lose(server, bus)
    async with asyncio.timeout(5.0):
        await bus.close()
    assert not bus.failed.done()


async def test_ten_outages_in_a_row(server: NatsServer, bus: NatsBus) -> None:
    await bus.subscribe("svc", Ping, echo)
    for n in range(10):
        await lose(server, bus, kill=bool(n % 2))
        await find(server, bus)
        assert await bus.request("svc", Ping(n), Ping, 5.0) == Ping(n)
    assert not bus.failed.done()


async def test_a_server_that_hangs_is_noticed_and_found_again_when_it_goes_on(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "PING_S", 0.1)
    bus = await connect(server.url, name="bus")
    await bus.subscribe("svc", Ping, echo)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await until(lambda: not bus.connected)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: bus.connected)
    assert await bus.request("svc", Ping(1), Ping, 5.0) == Ping(1)
    await bus.close()


async def test_a_connection_ended_for_good_is_told_as_a_failure(server: NatsServer, bus: NatsBus) -> None:
    """The restarted server requires a password that the bus does not have."""
    server.reconfigure("authorization { user: a, password: b }")
    with pytest.raises(Unavailable, match="authorization"):
        await asyncio.wait_for(bus.failed, 20.0)
    assert not bus.connected
    with pytest.raises(Unavailable):
        await bus.request("svc", Ping(), Ping, 5.0)


async def test_messages_that_come_faster_than_they_are_taken_are_dropped_and_counted(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "INBOX_MESSAGES", 5)
    receiver, sender = [await connect(server.url, name=n) for n in ("receiver", "sender")]
    got: list[int] = []
    await receiver.subscribe_ordered("count", Ping, lambda m: got.append(m.n))
    for n in range(1000):
        await sender.publish("count", Ping(n))
    await until(lambda: len(got) + receiver.counters.get("messages_dropped", 0) == 1000)
    assert got == sorted(got)
    assert receiver.counters["messages_dropped"] > 0
    assert receiver.connected
    await sender.close()
    await receiver.close()


async def test_a_handler_that_never_waits_refuses_nobody_however_many_ask_at_once(server: NatsServer) -> None:
    answerer, asker = [await connect(server.url, name=n, max_handlers=128) for n in ("answerer", "asker")]
    await answerer.subscribe("ping", Ping, echo)
    questions = [asker.request("ping", Ping(n), Ping, 30.0) for n in range(5000)]
    assert await asyncio.gather(*questions) == [Ping(n) for n in range(5000)]
    assert answerer.counters["messages_refused"] == 0
    await asker.close()
    await answerer.close()


async def test_close_sends_what_was_published_before(server: NatsServer, bus: NatsBus) -> None:
    got: list[int] = []
    await bus.subscribe_ordered("count", Ping, lambda m: got.append(m.n))
    other = await connect(server.url, name="other")
    for n in range(500):
        await other.publish("count", Ping(n))
    await other.close()
    await until(lambda: len(got) == 500)
