"""The four ways to request a generation, behind one interface: what a client got, by whichever protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import nats
from msgspec import Struct
from websockets.asyncio.client import connect as connect_socket

from shared.protocol import subjects


class Got(Struct):
    """An answer, assembled from its parts."""

    texts: list[str] = []
    finishes: list[str | None] = []
    logprobs: list[list[Any]] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    status: int = 200
    chunks: list[dict[str, Any]] = []


class Front:
    """Sends one request and gathers the answer."""

    def __init__(self, url: str, nats_url: str) -> None:
        self.url, self.nats_url = url, nats_url

    async def ask(self, kind: str, body: dict[str, Any]) -> Got:
        raise NotImplementedError


class HttpWhole(Front):
    async def ask(self, kind: str, body: dict[str, Any]) -> Got:
        async with httpx.AsyncClient(base_url=self.url, timeout=20.0, trust_env=False) as client:
            response = await client.post(path_of(kind), json=body)
        answer = response.json()
        if response.status_code != 200:
            return Got(error=answer["error"], status=response.status_code)
        choices = answer["choices"]
        return Got(
            texts=[c["message"]["content"] if kind == "chat" else c["text"] for c in choices],
            finishes=[c["finish_reason"] for c in choices],
            logprobs=[logprobs_of(kind, c) for c in choices],
            usage=answer["usage"],
            chunks=[answer],
        )


class HttpStream(Front):
    async def ask(self, kind: str, body: dict[str, Any]) -> Got:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=20.0, trust_env=False) as client,
            client.stream("POST", path_of(kind), json=body) as response,
        ):
            if response.status_code != 200:
                await response.aread()
                return Got(error=response.json()["error"], status=response.status_code)
            events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        last = json.loads(events[-1]) if events[-1] != "[DONE]" else None
        return gathered(kind, [json.loads(e) for e in events[:-1]], last["error"] if last else None)


class Socket(Front):
    async def ask(self, kind: str, body: dict[str, Any]) -> Got:
        chunks: list[dict[str, Any]] = []
        async with connect_socket(self.url.replace("http", "ws") + "/v1/stream") as socket:
            await socket.send(json.dumps({"kind": kind} | body))
            while True:
                message = json.loads(await socket.recv())
                if message.get("done") or "error" in message:
                    return gathered(kind, chunks, message.get("error"), message.get("status", 200))
                chunks.append(message)


class Nats(Front):
    """Generation over NATS, in msgpack or JSON."""

    def __init__(self, url: str, nats_url: str, as_json: bool) -> None:
        super().__init__(url, nats_url)
        self._encode: Any = msgspec.json.encode if as_json else msgspec.msgpack.encode
        self._decode: Any = msgspec.json.decode if as_json else msgspec.msgpack.decode

    async def ask(self, kind: str, body: dict[str, Any]) -> Got:
        chunks: list[dict[str, Any]] = []
        async with nats_call(self.nats_url, self._encode({"kind": kind, "body": body})) as events:
            seq = 0
            async for data in events:
                event = self._decode(data)
                assert event["seq"] == seq
                seq += 1
                if event.get("last"):
                    return gathered(kind, chunks, event.get("error"))
                if event.get("chunk") is not None:
                    chunks.append(event["chunk"])
        raise AssertionError("no last event")


@contextlib.asynccontextmanager
async def nats_call(url: str, data: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
    client = await nats.connect(url)
    try:
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox)
        await client.publish(subjects.GENERATE, data, reply=inbox)

        async def events() -> AsyncIterator[bytes]:
            while True:
                async with asyncio.timeout(20.0):
                    message = await subscription.next_msg(timeout=20.0)
                yield message.data

        yield events()
    finally:
        await client.close()


def path_of(kind: str) -> str:
    return "/v1/chat/completions" if kind == "chat" else "/v1/completions"


def logprobs_of(kind: str, choice: dict[str, Any]) -> list[Any]:
    said = choice.get("logprobs")
    if not said:
        return []
    if kind == "chat":
        return [(e["token"], e["logprob"]) for e in said["content"]]
    return list(zip(said["tokens"], said["token_logprobs"], said["text_offset"], strict=True))


def gathered(kind: str, chunks: list[dict[str, Any]], error: dict[str, Any] | None, status: int = 200) -> Got:
    got = Got(error=error, chunks=chunks, status=status)
    texts: dict[int, str] = {}
    finishes: dict[int, str | None] = {}
    logprobs: dict[int, list[Any]] = {}
    for chunk in chunks:
        got.usage = chunk.get("usage") or got.usage
        for choice in chunk["choices"]:
            i = choice["index"]
            text = choice["delta"].get("content", "") if kind == "chat" else choice["text"]
            texts[i] = texts.get(i, "") + text
            finishes[i] = choice["finish_reason"] or finishes.get(i)
            logprobs.setdefault(i, []).extend(logprobs_of(kind, choice))
    got.texts = [texts[i] for i in sorted(texts)]
    got.finishes = [finishes[i] for i in sorted(finishes)]
    got.logprobs = [logprobs[i] for i in sorted(logprobs)]
    return got


def all_fronts(url: str, nats_url: str) -> list[Front]:
    return [
        HttpWhole(url, nats_url),
        HttpStream(url, nats_url),
        Socket(url, nats_url),
        Nats(url, nats_url, as_json=False),
        Nats(url, nats_url, as_json=True),
    ]
