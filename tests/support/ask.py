"""Asking a gateway over HTTP, as the tests need it: exact token prompts, streams, many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(300.0, connect=10.0)


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    chunks: int = 0


def body(prompt: str | Sequence[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True
    } | options  # fmt: skip


async def complete(
    client: httpx.AsyncClient, prompt: str | Sequence[int], max_tokens: int, **options: Any
) -> Answer:
    reply = await client.post("/v1/completions", json=body(prompt, max_tokens, **options), timeout=TIMEOUT)
    assert reply.status_code == 200, reply.text
    data = reply.json()
    choice, usage = data["choices"][0], data["usage"]
    return Answer(
        choice["text"], choice["token_ids"], choice["finish_reason"], usage["prompt_tokens"],
        usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"], 1,
    )  # fmt: skip


async def stream(
    client: httpx.AsyncClient, prompt: str | Sequence[int], max_tokens: int, **options: Any
) -> Answer:
    answer = Answer()
    await follow(client, body(prompt, max_tokens, **options), answer)
    return answer


async def follow(client: httpx.AsyncClient, request: dict[str, Any], answer: Answer) -> None:
    """Stream into `answer` as it comes. Raises unless it is one clean stream: text, one finish_reason, usage, [DONE]."""
    request = request | {"stream": True, "stream_options": {"include_usage": True}}
    done = False
    async with client.stream("POST", "/v1/completions", json=request, timeout=TIMEOUT) as reply:
        assert reply.status_code == 200, (await reply.aread()).decode()
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not done, f"after [DONE]: {line}"
            if line == "data: [DONE]":
                done = True
                continue
            _take(json.loads(line[6:]), answer)
    assert done, "no [DONE]"
    assert answer.finish_reason is not None, "no finish_reason"


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    assert "error" not in chunk, chunk
    answer.chunks += 1
    for choice in chunk["choices"]:
        assert answer.finish_reason is None, "text after finish_reason"
        answer.text += choice["text"]
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"]
    if chunk.get("usage"):
        usage = chunk["usage"]
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


async def many(client: httpx.AsyncClient, jobs: Sequence[Any], at_once: int) -> list[Any]:
    """Run coroutine functions, `at_once` at a time; results in order."""
    gate = asyncio.Semaphore(at_once)

    async def one(job: Any) -> Any:
        async with gate:
            return await job()

    return list(await asyncio.gather(*(one(job) for job in jobs)))
