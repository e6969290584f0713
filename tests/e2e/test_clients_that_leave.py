"""Clients that leave or fall silent, over real services: with room for one request, the next is soon answered.

Prompt and answer of a request that is left would take minutes, so that nothing here is free because it has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import pytest
from websockets.asyncio.client import connect as connect_socket

from tests.support.processes.cluster import Cluster, cluster

Phase = Literal["prefill", "decode"]
MODEL = "toy:step_ms=5,prefill_us=2000"
LONG_PROMPT = "a long, long prompt " * 2500  # 100 s
SHORT_PROMPT = "on and on"
NUMBERS = itertools.count()
"""Makes prompts that nobody has asked before."""
ANSWER_TOKENS = 100_000  # 500 s
GATEWAY: dict[str, str | int | float] = {
    "max_running": 1, "keep_alive_s": 0.5, "stalled_s": 2.0, "buffer_bytes": 16 << 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    fields: dict[Any, Any] = {"gateway": GATEWAY, "prefill": {"chunk_tokens": 128}}
    with cluster(tmp_path_factory.mktemp("leaving"), model=MODEL, fields=fields) as running:
        yield running


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def close(client: socket.socket) -> None:
    client.close()


def say_no_more(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def shut_both_sides(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_RDWR)


def hear_no_more(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_RD)


def read_no_more(client: socket.socket) -> None:
    """It does not have to do anything."""


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [reset, close, say_no_more, shut_both_sides])
def test_a_client_that_leaves_frees_the_only_slot(
    house: Cluster, leave: Callable[[socket.socket], None], stream: bool, phase: Phase
) -> None:
    client = asked(house, phase, stream)
    leave(client)
    answered_again(house)
    client.close()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("leave", [hear_no_more, read_no_more])
def test_a_client_that_takes_nothing_frees_the_only_slot(
    house: Cluster, leave: Callable[[socket.socket], None], phase: Phase
) -> None:
    """A server can't tell it from one that waits before the connection is full: in prefill that is once tokens come."""
    prompt = "quite a long prompt " * 50  # 2 s
    client = asked(house, phase, True, prompt if phase == "prefill" else SHORT_PROMPT)
    leave(client)
    if phase == "prefill":
        busy_with(house, "decode")
    answered_again(house)
    client.close()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_websocket_that_is_gone_frees_the_only_slot(house: Cluster, phase: Phase) -> None:
    before = tokens_made(house)
    async with connect_socket(house.url.replace("http", "ws") + "/v1/stream") as client:
        await client.send(json.dumps({"kind": "completion"} | body_for(phase, True)))
        await asyncio.to_thread(busy_with, house, phase, before)
        client.transport.abort()
    await asyncio.to_thread(answered_again, house)


# -- inside ----------------------------------------------------------------------------------------------------------


def body_for(phase: Phase, stream: bool, prompt: str = "") -> dict[str, Any]:
    prompt = f"{next(NUMBERS)}: " + (prompt or (LONG_PROMPT if phase == "prefill" else SHORT_PROMPT))
    return {
        "model": "toy", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": stream, "ignore_eos": True,
    }  # fmt: skip


def asked(house: Cluster, phase: Phase, stream: bool, prompt: str = "") -> socket.socket:
    """A client with little room in its kernel, whose request is being worked on."""
    host, port = house.infos["gateway-0"].http.split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20.0)
    client.connect((host, int(port)))
    data = json.dumps(body_for(phase, stream, prompt)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    before = tokens_made(house)
    client.sendall(head.encode() + data)
    busy_with(house, phase, before)
    return client


def tokens_made(house: Cluster) -> float:
    return house.counters("decode").get("tokens_generated", 0.0)


def busy_with(house: Cluster, phase: Phase, tokens_before: float = 0.0) -> None:
    if phase == "prefill":
        house.wait_for(lambda: house.loads["prefill-0"].running == 1, 20.0, "it is prefilled")
        return
    house.wait_for(lambda: tokens_made(house) > tokens_before, 20.0, "tokens come")
    house.wait_for(lambda: house.loads["decode-0"].running == 1, 20.0, "it is decoded")


def answered_again(house: Cluster) -> None:
    """Nobody works for the client that left, and whoever comes next is served."""
    house.wait_idle(timeout_s=30.0)
    short = {"model": "toy", "prompt": "next", "max_tokens": 2}
    assert httpx.post(f"{house.url}/v1/completions", json=short, timeout=20.0).status_code == 200
    house.wait_idle()
    counters = house.loads["gateway-0"].counters
    assert counters["requests_error"] == 0
    assert counters["requests_aborted"] + counters["requests_ok"] == counters["requests_started"]
