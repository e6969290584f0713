"""What is particular to generation over NATS: numbering, signs of life, cancellation, nonsense."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
import pytest

from shared.protocol import subjects
from shared.protocol.generate import GenerateCall, GenerateCancel, GenerateEvent
from tests.support.fake_cluster import FakeCluster, nats_cluster
from tests.support.fronts import nats_call
from tests.support.nats import NatsServer, nats_server
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
