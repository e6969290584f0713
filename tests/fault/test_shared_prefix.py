"""Requests that arrive together and share a long prefix that nobody has yet: each node computes it once at most."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.protocol.ids import Role
from tests.support.processes.cluster import Cluster, Fields, cluster
from tests.support.until import until

REQUESTS = 32
PREFIX_TOKENS = 1500
TAIL_TOKENS = 100
PREFILL_NODES = 2
SHARED_TOKENS = PREFIX_TOKENS // 16 * 16
MODEL = "toy:step_ms=5,prefill_us=400"
SLOW = "toy:step_ms=5,prefill_us=1000"


def prompt(number: int) -> list[int]:
    """No two have a block in common behind the prefix: the tail begins with the number."""
    prefix = [97 + (i * 7 + i // 11) % 26 for i in range(PREFIX_TOKENS)]
    return prefix + [97 + number // 26, 97 + number % 26] + [97 + i % 26 for i in range(TAIL_TOKENS - 2)]


async def ask(http: httpx.AsyncClient, number: int, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt(number), "max_tokens": 4, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ask_together(house: Cluster, model: str = "toy", timeout_s: float = 60.0) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=house.url, timeout=timeout_s, trust_env=False) as http:
        return list(await asyncio.gather(*(ask(http, number, model) for number in range(REQUESTS))))


def computed(house: Cluster) -> float:
    return sum(house.counters(role).get("prompt_tokens_computed", 0.0) for role in ("prefill", "decode"))


@pytest.mark.parametrize("cache", [1, 0])
async def test_a_cold_prefix_is_computed_once_a_node_at_most(tmp_path: Path, cache: int) -> None:
    with cluster(tmp_path, prefill=PREFILL_NODES, decode=2, cache=cache, model=MODEL) as house:
        await ask_together(house)
        house.wait_idle()
        ideal = PREFIX_TOKENS * PREFILL_NODES + TAIL_TOKENS * REQUESTS
        assert REQUESTS * TAIL_TOKENS < computed(house) <= 1.3 * ideal


async def test_with_a_cache_the_other_node_waits_instead_of_computing_it_too(tmp_path: Path) -> None:
    with cluster(tmp_path, prefill=PREFILL_NODES, decode=2, model=MODEL) as house:
        answers = await ask_together(house)
        house.wait_idle()
        cold = [a for a in answers if not a["usage"]["prompt_tokens_details"]["cached_tokens"]]
        assert len(cold) == 1, [a["usage"] for a in cold]
        assert house.counters("prefill")["fetched_tokens"] >= SHARED_TOKENS
        assert computed(house) == SHARED_TOKENS + REQUESTS * (PREFIX_TOKENS + TAIL_TOKENS - SHARED_TOKENS)


@pytest.mark.parametrize("node", ["prefill-0", "prefill-1"])
async def test_who_waits_for_a_node_that_dies_computes_it(tmp_path: Path, node: str) -> None:
    """One of the two computes the prefix while the other waits for it. Either way every answer comes."""
    with cluster(tmp_path, prefill=PREFILL_NODES, decode=2, model=SLOW) as house:
        asking = asyncio.create_task(ask_together(house))
        await until(lambda: any(house.loads[n].running for n in house.nodes("prefill")))
        house.kill(node)
        assert len(await asking) == REQUESTS
        house.start(node)
        house.wait_ready()


@pytest.mark.real
@pytest.mark.slow
async def test_the_same_with_a_real_model(tmp_path: Path) -> None:
    room = {"kv_bytes": 2 << 30}
    fields: dict[Role, Fields] = {"prefill": room, "decode": room, "cache": {"pool_bytes": 1 << 30}}
    real = "smollm2-135m"
    with cluster(tmp_path, prefill=PREFILL_NODES, decode=2, model=real, fields=fields) as house:
        await ask_together(house, real, timeout_s=400.0)
        house.wait_idle()
        ideal = PREFIX_TOKENS * PREFILL_NODES + TAIL_TOKENS * REQUESTS
        assert REQUESTS * TAIL_TOKENS < computed(house) <= 1.3 * ideal
