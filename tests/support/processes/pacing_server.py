"""A small OpenAI-compatible server on a real socket. It answers at a known pace and fails as told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from msgspec import Struct

MODEL = "paced"
MEASURING = 1
"""A request for this many tokens is a calibration request: always answered at once."""


class Plan(Struct):
    """How one request is answered."""

    status: int = 200
    texts: tuple[str, ...] = ("one ", "two ", "three ")
    """The text of each chunk."""
    tokens: int = 3
    error: str = ""
    """If set, the stream ends after the texts with this error as an event."""
    cut: bool = False
    """End the stream without a final event."""
    usage: bool = True


class PacingServer:
    """Records requests for more than one token, and answers none before `gather` of them have arrived."""

    def __init__(self, plan: Callable[[int], Plan], *, first_s: float, gap_s: float, gather: int) -> None:
        self.plan, self.first_s, self.gap_s, self.gather = plan, first_s, gap_s, gather
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.in_flight = self.most_in_flight = 0
        self._gathered = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        self.keys.add(headers.get(b"authorization", b"").decode())
        if scope["path"] == "/v1/models":
            await _whole(send, 200, {"data": [{"id": MODEL}]})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        if asked["model"] != MODEL:
            said = {
                "message": f"the model {asked['model']} does not exist",
                "code": 404,
                "type": "NotFoundError",
            }
            await _whole(send, 404, {"error": said})
            return
        words = len((asked.get("prompt") or asked["messages"][0]["content"]).split())
        if asked["max_tokens"] == MEASURING:
            await self._answer(send, Plan(texts=("x",), tokens=1), words, 0.0, 0.0)
            return
        number = len(self.bodies)
        self.bodies.append(asked)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if len(self.bodies) >= self.gather:
                self._gathered.set()
            await self._gathered.wait()
            await self._answer(send, self.plan(number), words, self.first_s, self.gap_s)
        finally:
            self.in_flight -= 1

    async def _answer(self, send: Any, plan: Plan, words: int, first_s: float, gap_s: float) -> None:
        if plan.status != 200:
            said = {"message": f"later, {words} words", "code": "overloaded"}
            await _whole(send, plan.status, {"error": said})
            return
        await send(_start(200, b"text/event-stream"))
        await asyncio.sleep(first_s)
        for i, text in enumerate(plan.texts):
            if i:
                await asyncio.sleep(gap_s)
            await send(_event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
        if plan.error:
            await send(_event({"error": {"message": "lost it", "code": plan.error}}))
        elif not plan.cut:
            await send(_event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
            if plan.usage:
                usage = {"prompt_tokens": 2 * words + 5, "completion_tokens": plan.tokens}
                await send(_event({"choices": [], "usage": usage}))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _start(status: int, kind: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def _event(chunk: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http.response.body",
        "body": f"data: {json.dumps(chunk)}\n\n".encode(),
        "more_body": True,
    }


async def _whole(send: Any, status: int, answer: dict[str, Any]) -> None:
    await send(_start(status, b"application/json"))
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@contextlib.contextmanager
def pacing_server(
    plan: Callable[[int], Plan] = lambda number: Plan(),
    *,
    first_s: float = 0.0,
    gap_s: float = 0.0,
    gather: int = 0,
) -> Iterator[PacingServer]:
    server = PacingServer(plan, first_s=first_s, gap_s=gap_s, gather=gather)
    listener = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    http = uvicorn.Server(
        uvicorn.Config(server, lifespan="off", log_config=None, timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=lambda: asyncio.run(http.serve([listener])))
    thread.start()
    try:
        yield server
    finally:
        http.should_exit = True
        thread.join()
        listener.close()
