"""Clients that leave, half-close, stop reading, or read slowly: nodes are free soon, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.gateway.api.answer import TokenEntry, Update
from services.gateway.fronts.http import SEND_BUFFER_BYTES, listen
from services.gateway.generation.outbox import Outbox
from shared.protocol.errors import Cancelled
from shared.protocol.sampling import TokenLogprob
from tests.support.fakes.fake_cluster import FakeCluster, memory_cluster
from tests.support.until import until

FOR_EVER = {"model": "toy", "messages": [{"role": "user", "content": "for ever"}]}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with memory_cluster(keep_alive_s=0.3, max_running=1, buffer_bytes=300, stalled_s=3.0) as cluster:
        yield cluster


async def connect(cluster: FakeCluster, body: dict[str, Any], small_window: bool = False) -> socket.socket:
    """Send a request over a plain socket."""
    host, port = cluster.app.address.split(":")
    client = socket.socket()
    if small_window:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + data)
    return client


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def close(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [reset, close, half_close])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_in_prefill_frees_the_slot(
    cluster: FakeCluster, leave: Callable[[socket.socket], None], stream: bool
) -> None:
    cluster.prefills[0].token_s = 3600.0  # it never gets a token: nothing else could end it
    client = await connect(cluster, FOR_EVER | {"stream": stream})
    await until(lambda: cluster.prefills[0].work)
    leave(client)
    await until(lambda: not cluster.gateway.running, timeout_s=5.0)
    await until(lambda: not cluster.prefills[0].work and not cluster.decodes[0].work)
    assert set(cluster.prefills[0].cancelled.values()) == {"client_left"}
    client.close()
    cluster.prefills[0].token_s = 0.0
    body = FOR_EVER | {"max_tokens": 2}
    assert (await cluster.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("leave", [reset, close, half_close])
async def test_a_client_that_leaves_in_decode_frees_the_slot(
    cluster: FakeCluster, leave: Callable[[socket.socket], None]
) -> None:
    cluster.decodes[0].token_s = 0.01
    client = await connect(cluster, FOR_EVER | {"stream": True})
    await asyncio.get_running_loop().sock_recv(client, 100)
    leave(client)
    await cluster.idle()
    assert cluster.sample("tsukimi_requests_ended_total", outcome="aborted") == 1


async def test_a_half_close_counts_with_full_buffers_too() -> None:
    """What is still to be sent must not keep the connection open."""
    async with memory_cluster(buffer_bytes=1 << 30, stalled_s=3600.0) as cluster:
        client = await connect(cluster, FOR_EVER | {"stream": True}, small_window=True)
        await until(lambda: waiting_bytes(cluster) > 300)
        cluster.slow_down(0.05)
        half_close(client)
        await cluster.idle()
        assert set(cluster.decodes[0].cancelled.values()) == {"client_left"}
        client.close()


def waiting_bytes(cluster: FakeCluster) -> int:
    """Text that the front could not take yet, since its connection is full."""
    return sum(generation._outbox.size_bytes for generation in cluster.gateway.running.values())


async def test_a_trickle_that_is_never_read_is_noticed(cluster: FakeCluster) -> None:
    """Long before anything of the gateway's own is full: the client's window is shut for stalled_s."""
    cluster.decodes[0].token_s = 0.1
    client = await connect(cluster, FOR_EVER | {"stream": True}, small_window=True)
    await until(lambda: cluster.decodes[0].work)
    await cluster.idle()
    [(attempt, reason)] = cluster.decodes[0].cancelled.items()
    assert reason == "client_left"
    assert len(cluster.decodes[0].over[attempt].made) * 200 < SEND_BUFFER_BYTES
    client.close()


def test_connections_inherit_the_watch_for_silence() -> None:
    listen("127.0.0.1", 0, 1e12).close()
    listener = listen("127.0.0.1", 0, 12.0)
    listener.listen()
    client = socket.create_connection(listener.getsockname())
    listener.setblocking(True)
    connection, _ = listener.accept()
    with client, connection, listener:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3


async def test_a_client_that_never_reads_is_cut_off_with_a_reason(cluster: FakeCluster) -> None:
    client = await connect(cluster, FOR_EVER | {"stream": True}, small_window=True)
    await until(lambda: "slow_client" in cluster.decodes[0].cancelled.values(), timeout_s=60.0)
    assert not cluster.decodes[0].work
    await cluster.idle()  # the connection is reset after stalled_s
    assert cluster.sample("tsukimi_requests_ended_total", outcome="aborted") == 1
    client.close()


async def test_a_slow_reader_gets_fewer_larger_pieces() -> None:
    outbox = Outbox(2)
    for i in range(1000):
        outbox.put(Update(i % 2, text="ab"))
    first, second = await outbox.take(1.0)
    assert (first.choice, first.text, second.choice) == (0, "ab" * 500, 1)
    assert outbox.size_bytes == 0
    assert await outbox.take(0.0) == []


async def test_the_outbox_gives_what_came_before_an_error_first() -> None:
    outbox = Outbox(1)
    outbox.put(Update(0, text="x"))
    outbox.fail(Cancelled("why"))
    outbox.fail(Cancelled("another reason"))
    assert [u.text for u in await outbox.take(1.0)] == ["x"]
    for _ in range(2):
        with pytest.raises(Cancelled, match="why"):
            await outbox.take(1.0)


async def test_the_outbox_ends_when_every_choice_has() -> None:
    outbox = Outbox(2)
    outbox.put(Update(0, text="x", entries=[TokenEntry(1, TokenLogprob(-1.0), 0)]))
    outbox.put(Update(0, finish="stop"))
    outbox.put(Update(1, finish="length"))
    assert outbox.size_bytes > 1
    assert not outbox.ended
    updates = await outbox.take(1.0)
    assert [(u.choice, u.finish, len(u.entries)) for u in updates] == [(0, "stop", 1), (1, "length", 0)]
    assert outbox.ended
