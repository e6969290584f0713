"""Sends the rows of a trace to a live cluster, each at its own time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from tsukimi.client import http_options
from tsukimi.traffic.asking import Sample, ask
from tsukimi.traffic.settings import Load
from tsukimi.traffic.trace_rows import Prompts, ScaledRow

Told = Callable[[Sample], None]


async def replay_rows(
    url: str, api_key: str, load: Load, rows: Sequence[ScaledRow], prompts: Prompts, speed: float, told: Told
) -> list[Sample]:
    """An open loop: every row is sent at its arrival time divided by `speed`, however many are unanswered."""
    tokens = [prompts.of(row) for row in rows]  # drawn beforehand: it must not make a sending late
    samples: list[Sample] = []
    async with http_to(url, api_key) as http, asyncio.TaskGroup() as requests:
        start = time.perf_counter()

        async def one(i: int, due_s: float) -> None:
            row = rows[i]
            samples.append(await ask(http, load, tokens[i], row.number, due_s, start, row.output_tokens))
            told(samples[-1])

        for i, row in enumerate(rows):
            due_s = (row.arrival_s - rows[0].arrival_s) / speed
            await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
            requests.create_task(one(i, due_s))
    return sorted(samples, key=lambda s: s.number)


async def saturated_rate(
    url: str, api_key: str, load: Load, rows: Sequence[ScaledRow], prompts: Prompts, told: Told
) -> float:
    """Requests a second that the cluster answers when `load.concurrency` clients never let it rest."""
    tokens = [prompts.of(row) for row in rows]
    numbers = iter(range(len(rows)))
    done = 0
    async with http_to(url, api_key) as http:
        start = time.perf_counter()

        async def client() -> None:
            nonlocal done
            for i in numbers:  # shared by all clients: each takes the next
                due_s = time.perf_counter() - start
                sample = await ask(http, load, tokens[i], rows[i].number, due_s, start, rows[i].output_tokens)
                done += not sample.reason
                told(sample)

        async with asyncio.TaskGroup() as clients:
            for _ in range(load.concurrency):
                clients.create_task(client())
        return done / (time.perf_counter() - start)


def http_to(url: str, api_key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(**http_options(url, api_key), limits=limits)
