"""What only generation over NATS has: event numbers, keep-alives, cancellation, and malformed calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest

from shared.protocol import subjects
from shared.protocol.generate import GenerateCall, GenerateCancel, GenerateEvent
from tests.support.fakes.fake_cluster import FakeCluster, nats_cluster
from tests.support.fakes.fronts import nats_call
from tests.support.processes.nats import NatsServer, nats_server
from tests.support.until import until


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as server:
        yield server


@pytest.fixture
async def cluster(server: NatsServer) -> AsyncIterator[FakeCluster]:
    async with nats_cluster(server, keep_alive_s=0.2) as cluster:
        yield cluster
        await cluster.idle()


def call(text: str, id_: str = "") -> bytes:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}]}
    return msgspec.msgpack.encode(GenerateCall("chat", body, id_))


async def all_events(server: NatsServer, data: bytes) -> list[GenerateEvent]:
    got: list[GenerateEvent] = []
    async with nats_call(server.url, data) as events:
        async for event in events:
            got.append(msgspec.msgpack.decode(event, type=GenerateEvent))
            if got[-1].last:
                break
    return got


async def test_events_are_numbered_and_the_last_is_marked(cluster: FakeCluster, server: NatsServer) -> None:
    got = await all_events(server, call("<<say:hi>>", "mine"))
    assert [e.seq for e in got] == list(range(len(got)))
    assert [e.last for e in got] == [False] * (len(got) - 1) + [True]
    assert {e.id for e in got} == {"mine"}
    assert got[-2].chunk["usage"]["completion_tokens"] == 3


async def test_signs_of_life_while_prefill_works(cluster: FakeCluster, server: NatsServer) -> None:
    cluster.slow_down(0.5)
    got = await all_events(server, call("<<say:>>"))
    assert got[0].chunk is None
    assert not got[0].last
    assert got[-1].error is None


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_cancelled_generation_ends_and_frees_the_nodes(
    cluster: FakeCluster, server: NatsServer, as_json: bool
) -> None:
    cluster.slow_down(0.02)
    cancel = GenerateCancel("mine")
    encode: Any = msgspec.json.encode if as_json else msgspec.msgpack.encode
    client = await nats.connect(server.url)
    last = None
    async with nats_call(server.url, call("for ever", "mine")) as events:
        async for data in events:
            last = msgspec.msgpack.decode(data, type=GenerateEvent)
            if last.seq == 3:
                await client.publish(subjects.GENERATE_CANCEL, encode(GenerateCancel("another")))
                await client.publish(subjects.GENERATE_CANCEL, b"\xffnonsense")
                await client.publish(subjects.GENERATE_CANCEL, encode(cancel))
            if last.last:
                break
    await client.close()
    assert last is not None
    assert last.error is not None
    assert last.error.code == "cancelled"
    await cluster.idle()
    assert set(cluster.decodes[0].cancelled.values()) == {"client_cancelled"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"{",
        b"[]",
        b"{}",
        b'{"kind":"poem","body":{}}',
        b'{"kind":"chat","body":null}',
        msgspec.msgpack.encode({"kind": "chat"}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(
            {"kind": "chat", "body": {"messages": [{"role": "user", "content": b"\xff"}]}}
        ),
    ],
)
async def test_nonsense_is_answered_with_an_error(
    cluster: FakeCluster, server: NatsServer, data: bytes
) -> None:
    async with nats_call(server.url, data) as events:
        answer = await anext(events)
    event = json.loads(answer) if data[:1] == b"{" else msgspec.msgpack.decode(answer)
    assert event["last"]
    assert event["error"]["code"] == "invalid"
    assert (await all_events(server, call("<<say:ok>>")))[-1].error is None


async def test_two_gateways_share_the_calls(server: NatsServer) -> None:
    async with nats_cluster(server) as one, nats_cluster(server, node="gateway-1") as two:
        for _ in range(12):
            await all_events(server, call("<<say:ok>>"))
        await until(lambda: not one.gateway.running and not two.gateway.running)
        counts = [c.sample("tsukimi_requests_ended_total", outcome="ok") for c in (one, two)]
        assert sum(counts) == 12


# -- callers that are gone -------------------------------------------------------------------------------------------


async def leave(server: NatsServer, data: bytes, how: str, after: int) -> None:
    """Call, take `after` events, and leave."""
    client = await nats.connect(server.url)
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subjects.GENERATE, data, reply=inbox)
    await client.flush()
    for _ in range(after):
        await subscription.next_msg(timeout=20.0)
    if how == "unsubscribe":
        await subscription.unsubscribe()
        await client.flush()
    else:
        await client.close()
    await client.close()


@pytest.mark.parametrize("how", ["unsubscribe", "close"])
@pytest.mark.parametrize("after", [0, 4])
async def test_a_caller_that_is_gone_frees_the_nodes(
    cluster: FakeCluster, server: NatsServer, how: str, after: int
) -> None:
    """The caller leaves during prefill, where only a keep-alive can reveal it, or while tokens are arriving."""
    cluster.prefills[0].token_s = 0.0 if after else 3600.0
    cluster.decodes[0].token_s = 0.02
    stays = asyncio.create_task(all_events(server, call("<<say:who stays>>"))) if after else None
    await leave(server, call("for ever"), how, after)
    node = cluster.decodes[0] if after else cluster.prefills[0]
    await until(lambda: node.cancelled)  # the call may not have reached the gateway yet
    await cluster.idle()
    assert set(node.cancelled.values()) == {"client_left"}
    assert cluster.sample("tsukimi_requests_ended_total", outcome="aborted") == 1
    if stays is not None:
        assert (await stays)[-1].error is None


async def test_a_caller_that_comes_back_after_an_outage_is_not_taken_for_gone(server: NatsServer) -> None:
    async with nats_cluster(server, keep_alive_s=0.2) as cluster:
        cluster.slow_down(0.05)
        client = await nats.connect(server.url, reconnect_time_wait=1, max_reconnect_attempts=-1)
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        await client.publish(subjects.GENERATE, call("<<say:" + "on and on " * 10 + ">>"), reply=inbox)
        await subscription.next_msg(timeout=20.0)
        await asyncio.to_thread(server.kill)
        server.start()
        while not (event := await next_event(subscription)).last:
            pass
        assert event.error is None
        await client.close()
        await cluster.idle()


async def next_event(subscription: Any) -> GenerateEvent:
    message = await subscription.next_msg(timeout=30.0)
    return msgspec.msgpack.decode(message.data, type=GenerateEvent)


# -- sizes -----------------------------------------------------------------------------------------------------------

HELD_BACK = {  # held back as a possible stop string, then 300 tokens with logprobs come in one event
    "stop": ["x" * 300],
    "logprobs": True,
    "messages": [{"role": "user", "content": f"<<say:{'x' * 299}y and more>>"}],
}
TOO_LARGE: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{"role": "user", "content": "a long prompt " * 200}]}, "max_payload of 8000", "prompt"),
    (HELD_BACK, "max_payload of 8000", "answer"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "the limit of 5000 bytes", "call"),
]


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(("body", "limit", "what"), TOO_LARGE, ids=[what for _, _, what in TOO_LARGE])
async def test_what_is_too_large_is_told_with_both_sizes(
    body: dict[str, Any], limit: str, what: str, as_json: bool
) -> None:
    encode: Any = msgspec.json.encode if as_json else msgspec.msgpack.encode
    decode: Any = msgspec.json.decode if as_json else msgspec.msgpack.decode
    async with (
        nats_server("max_payload: 8000") as server,
        nats_cluster(server, max_body_bytes=5000) as cluster,
    ):
        got: list[GenerateEvent] = []
        data = encode(GenerateCall("chat", {"model": "toy"} | body, "mine"))
        async with nats_call(server.url, data) as events:
            async for event in events:
                got.append(decode(event, type=GenerateEvent))
                if got[-1].last:
                    break
        error = got[-1].error
        assert error is not None
        assert (error.code, got[-1].id, got[-1].seq) == ("too_large", "mine", len(got) - 1)
        assert limit in error.message
        assert len(re.findall(r"\d{4,}", error.message)) == 2
        assert (len(got) > 1) == (what == "answer")
        await cluster.idle()
        assert (await all_events(server, call("<<say:ok>>")))[-1].error is None


async def test_a_name_too_long_for_events_is_refused(cluster: FakeCluster, server: NatsServer) -> None:
    [event] = await all_events(server, call("<<say:ok>>", "n" * 5000))
    assert event.error is not None
    assert (event.error.code, event.error.param) == ("invalid", "id")
