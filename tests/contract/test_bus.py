"""What every bus implementation guarantees: requests and publications. For bounds and closing see test_bus_bounds.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from shared.io.bus import Stream, received_headers, sent_headers
from shared.protocol.errors import (
    BlockMissing,
    DeadlineExceeded,
    Internal,
    Invalid,
    Overloaded,
    TooLarge,
    Unavailable,
)
from shared.protocol.wire import Undecoded, decode, encode
from tests.support.fakes.bus_house import MAX_PAYLOAD_BYTES, House, Other, Ping, Pong, pong, sized
from tests.support.until import until

# -- asking ----------------------------------------------------------------------------------------------------------


async def test_request_and_reply(house: House) -> None:
    server, client = await house.bus(), await house.bus()
    await server.subscribe("svc.ping", Ping, pong)
    assert await client.request("svc.ping", Ping(41, b"x"), Pong, 5.0) == Pong(42, b"x")


async def test_a_bus_hears_its_own_messages(house: House) -> None:
    bus = await house.bus()
    await bus.subscribe("svc.ping", Ping, pong)
    assert await bus.request("svc.ping", Ping(1), Pong, 5.0) == Pong(2)


async def test_a_raised_error_arrives_as_it_was(house: House) -> None:
    async def refuse(_: Ping) -> Pong:
        raise Overloaded("full", retry_after_s=1.5)

    async def miss(_: Ping) -> Pong:
        raise BlockMissing("block 3", param="keys")

    bus = await house.bus()
    await bus.subscribe("svc.refuse", Ping, refuse)
    await bus.subscribe("svc.miss", Ping, miss)
    with pytest.raises(Overloaded, match="full") as overloaded:
        await bus.request("svc.refuse", Ping(), Pong, 5.0)
    assert overloaded.value.retry_after_s == 1.5
    with pytest.raises(BlockMissing, match="block 3") as missing:
        await bus.request("svc.miss", Ping(), Pong, 5.0)
    assert missing.value.param == "keys"


async def test_a_bug_in_a_handler_is_an_opaque_internal_error(house: House) -> None:
    async def fail(_: Ping) -> Pong:
        raise KeyError("the secret of the house")

    bus = await house.bus()
    await bus.subscribe("svc.fail", Ping, fail)
    with pytest.raises(Internal) as e:
        await bus.request("svc.fail", Ping(), Pong, 5.0)
    assert "secret" not in str(e.value)
    assert bus.counters["handler_bugs"] == 1


async def test_a_message_that_does_not_decode_is_answered_invalid_and_counted(house: House) -> None:
    calls: list[Ping] = []

    async def count(ping: Ping) -> Pong:
        calls.append(ping)
        return Pong()

    bus = await house.bus()
    await bus.subscribe("svc.ping", Ping, count)
    await bus.subscribe_ordered("svc.ordered", Ping, calls.append)
    with pytest.raises(Invalid, match="malformed"):
        await bus.request("svc.ping", Other(), Pong, 5.0)
    await bus.publish("svc.ordered", Other())
    await bus.publish("svc.ordered", Ping(7))
    await until(lambda: calls == [Ping(7)])
    assert bus.counters["messages_undecodable"] == 2


async def test_an_answer_of_another_type_is_invalid(house: House) -> None:
    bus = await house.bus()
    await bus.subscribe("svc.ping", Ping, pong)
    with pytest.raises(Invalid):
        await bus.request("svc.ping", Ping(), Other, 5.0)


async def test_nothing_returned_answers_an_asker_at_once(house: House) -> None:
    async def nothing(_: Ping) -> None: ...

    bus = await house.bus()
    await bus.subscribe("svc.nothing", Ping, nothing)
    with pytest.raises(Invalid):
        await bus.request("svc.nothing", Ping(), Pong, 5.0)


async def test_nobody_listening_is_unavailable_long_before_the_time_out(house: House) -> None:
    bus, gone = await house.bus(), await house.bus()
    subscription = await gone.subscribe("svc.gone", Ping, pong)
    assert await bus.request("svc.gone", Ping(), Pong, 5.0) == Pong(1)
    await subscription.unsubscribe()
    async with asyncio.timeout(5.0):
        for subject in ("svc.never", "svc.gone"):
            with pytest.raises(Unavailable):
                await bus.request(subject, Ping(), Pong, 3600.0)


async def test_a_silent_handler_is_a_passed_deadline(house: House) -> None:
    async def sleep(_: Ping) -> Pong:
        await asyncio.sleep(0.5)
        return Pong()

    bus = await house.bus()
    await bus.subscribe("svc.sleep", Ping, sleep)
    with pytest.raises(DeadlineExceeded, match=r"svc\.sleep"):
        await bus.request("svc.sleep", Ping(), Pong, 0.05)


async def test_a_stream_of_replies_arrives_in_order_on_the_reply_subject(house: House) -> None:
    async def count(ping: Ping) -> Any:
        async def parts() -> AsyncIterator[Pong]:
            for n in range(ping.n):
                yield Pong(n)

        return parts()

    bus = await house.bus()
    await bus.subscribe("svc.count", Ping, count)
    assert await bus.request("svc.count", Ping(3), Pong, 5.0) == Pong(0)


async def test_a_stream_is_told_when_its_asker_has_gone(house: House) -> None:
    async def count(ping: Ping) -> Stream:
        async def parts() -> AsyncGenerator[Pong, None]:
            for n in itertools.count():
                yield Pong(n)
                await asyncio.sleep(0.01)
                if gone:
                    return

        return Stream(parts(), lambda: gone.append(ping.n))

    gone: list[int] = []
    bus, stays, leaves = await house.bus(), await house.bus(), await house.bus()
    await bus.subscribe("svc.count", Ping, count)
    assert await leaves.request("svc.count", Ping(7), Pong, 5.0) == Pong(0)
    for _ in range(5):
        assert await stays.request("svc.count", Ping(1), Pong, 5.0) == Pong(0)
        assert not gone
    await leaves.close()
    await until(lambda: gone)
    assert set(gone) == {7}


async def test_a_handler_may_speak_in_bytes(house: House) -> None:
    async def reverse(message: Undecoded) -> Undecoded:
        return Undecoded(encode(Pong(decode(message.data, Ping).n, message.data[::-1])))

    bus = await house.bus()
    await bus.subscribe("svc.bytes", Undecoded, reverse)
    assert await bus.request("svc.bytes", Ping(3), Pong, 5.0) == Pong(3, encode(Ping(3))[::-1])


# -- telling ---------------------------------------------------------------------------------------------------------


async def test_everybody_gets_what_is_published_and_one_of_each_queue_group(house: House) -> None:
    got: list[str] = []

    def taker(name: str) -> Any:
        async def take(_: Ping) -> None:
            got.append(name)

        return take

    buses = [await house.bus() for _ in range(3)]
    for bus in buses:
        await bus.subscribe("news", Ping, taker("plain"))
        await bus.subscribe("news", Ping, taker("a"), queue="a")
        await bus.subscribe("news", Ping, taker("b"), queue="b")
    for _ in range(10):
        await buses[0].publish("news", Ping())
    await until(lambda: len(got) >= 50)
    await buses[0].flush()
    assert {name: got.count(name) for name in set(got)} == {"plain": 30, "a": 10, "b": 10}


async def test_ordered_messages_keep_their_order(house: House) -> None:
    sender, receiver = await house.bus(), await house.bus()
    got: list[int] = []
    await receiver.subscribe_ordered("count.*", Ping, lambda m: got.append(m.n))
    for n in range(2000):
        await sender.publish(f"count.{n % 2}", Ping(n))
    await until(lambda: len(got) == 2000)
    assert got == list(range(2000))


async def test_an_exception_of_an_ordered_handler_does_not_stop_the_stream(house: House) -> None:
    bus = await house.bus()
    got: list[int] = []

    def take(ping: Ping) -> None:
        if ping.n == 1:
            raise KeyError("one")
        got.append(ping.n)

    await bus.subscribe_ordered("count", Ping, take)
    for n in range(3):
        await bus.publish("count", Ping(n))
    await until(lambda: got == [0, 2])
    assert bus.counters["handler_bugs"] == 1


async def test_wildcards(house: House) -> None:
    bus = await house.bus()
    star: list[int] = []
    rest: list[int] = []
    await bus.subscribe_ordered("a.*.c", Ping, lambda m: star.append(m.n))
    await bus.subscribe_ordered("a.>", Ping, lambda m: rest.append(m.n))
    for n, subject in enumerate(["a.b.c", "a.b", "a.b.c.d", "a", "b.b.c"]):
        await bus.publish(subject, Ping(n))
    await bus.publish("a.x.c", Ping(9))
    await until(lambda: star == [0, 9])
    assert rest == [0, 1, 2, 9]


async def test_unsubscribe_ends_delivery_and_may_be_repeated(house: House) -> None:
    bus = await house.bus()
    got: list[int] = []
    subscription = await bus.subscribe_ordered("count", Ping, lambda m: got.append(m.n))
    await bus.publish("count", Ping(1))
    await until(lambda: got == [1])
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish("count", Ping(2))
    await bus.flush()
    assert got == [1]


# -- headers ---------------------------------------------------------------------------------------------------------


async def test_headers_travel_with_messages_and_requests_and_no_further(house: House) -> None:
    got: list[dict[str, str]] = []

    async def relay(ping: Ping) -> Pong:
        got.append(dict(received_headers()))
        await server.publish("news", ping)
        return Pong(ping.n)

    server, client = await house.bus(), await house.bus()
    await server.subscribe("svc.ping", Ping, relay)
    await client.subscribe_ordered("news", Ping, lambda _: got.append(dict(received_headers())))
    with sent_headers({"traceparent": "00-ab-cd-01"}), sent_headers({"x-key": "ü and spaces"}):
        await client.request("svc.ping", Ping(1), Pong, 5.0)
        await client.publish("news", Ping(2))
    await client.request("svc.ping", Ping(3), Pong, 5.0)
    await until(lambda: len(got) == 5)
    assert received_headers() == {}
    assert got.count({"traceparent": "00-ab-cd-01", "x-key": "ü and spaces"}) == 2
    assert got.count({}) == 3  # what the handler published, and all of the second request


@pytest.mark.parametrize(
    "headers", [{"a b": "x"}, {"": "x"}, {"a": "x\r\nb: y"}, {"a": " x"}, {"a": "x" * 5000}]
)
def test_headers_that_cannot_travel_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Invalid), sent_headers(headers):
        raise AssertionError("never entered")


async def test_headers_count_towards_the_largest_message(house: House) -> None:
    bus = await house.bus()
    fits = sized(Ping, MAX_PAYLOAD_BYTES)
    await bus.publish("news", fits)
    with sent_headers({"a": "b"}), pytest.raises(TooLarge):
        await bus.publish("news", fits)
    await bus.flush()
    assert bus.connected
