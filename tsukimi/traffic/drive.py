"""Sends the requests of a load: each when the one before is answered (closed loop), or at its own time (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import httpx

from tsukimi.client import Client, Failed, Outcome, http_options
from tsukimi.prompts import never_seen, text, words_for
from tsukimi.traffic.asking import Sample, ask
from tsukimi.traffic.settings import Load, arrivals

Told = Callable[[Sample], None]


def fitting_words(client: Client, load: Load, rng: random.Random) -> int:
    """How many words make a prompt of the wanted length here. Raises ToolError if the server does not answer properly."""

    def count_tokens(prompt: str) -> int:
        outcome = Outcome()
        for _ in client.stream(load.path, load.body(prompt, output_tokens=1), outcome):
            pass
        return outcome.prompt_tokens

    return words_for(load.input_tokens, count_tokens, rng)


async def drive(url: str, api_key: str, load: Load, words: int, told: Told) -> list[Sample]:
    """All samples, by number. Calls `told` with each as it ends. Raises Failed if a warm-up request fails."""
    rng = never_seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(**http_options(url, api_key), limits=limits) as http:
        for _ in range(load.warmup):
            warm = await ask(http, load, text(rng, words), -1, 0.0, time.perf_counter())
            if warm.reason:
                raise Failed(warm.reason, f"the warm-up request failed: {warm.error}")
        prompts = [text(rng, words) for _ in range(load.requests)]
        samples = await (_open if load.rate else _closed)(http, load, prompts, told)
    return sorted(samples, key=lambda s: s.number)


async def _closed(http: httpx.AsyncClient, load: Load, prompts: list[str], told: Told) -> list[Sample]:
    start = time.perf_counter()
    samples: list[Sample] = []
    numbers = iter(range(len(prompts)))

    async def one_client() -> None:
        for number in numbers:  # shared by all clients: each takes the next
            due_s = time.perf_counter() - start
            samples.append(await ask(http, load, prompts[number], number, due_s, start))
            told(samples[-1])

    async with asyncio.TaskGroup() as clients:
        for _ in range(min(load.concurrency, len(prompts))):
            clients.create_task(one_client())
    return samples


async def _open(http: httpx.AsyncClient, load: Load, prompts: list[str], told: Told) -> list[Sample]:
    start = time.perf_counter()
    samples: list[Sample] = []

    async def one(number: int, due_s: float) -> None:
        samples.append(await ask(http, load, prompts[number], number, due_s, start))
        told(samples[-1])

    async with asyncio.TaskGroup() as requests:
        for number, due_s in enumerate(arrivals(load.rate, len(prompts), load.seed)):
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            requests.create_task(one(number, due_s))
    return samples
