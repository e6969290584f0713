"""What the simulator says of a trace is what a live cluster of as many nodes does with it.

Of its own among the slow suites: another test beside it would make the live nodes late, which simulated ones never are.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from shared.core.costs.presets import PRESETS
from shared.protocol.cluster import CostCoefficients
from tests.support.processes.cluster import Cluster, cluster
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import TRACE_BLOCK_TOKENS, TraceRequest, parse_trace

PREFILL, DECODE = 2, 1
TOKEN_US, STEP_MS = 400, 5
CHUNK_TOKENS, MAX_PREFILLS = 512, 4
KV_BYTES, TOKEN_BYTES = 64 << 20, 128
TOY = CostCoefficients(
    prefill_fixed_s=1e-3,
    prefill_token_s=TOKEN_US / 1e6,
    load_token_s=1e-8,
    step_fixed_s=STEP_MS / 1e3,
    step_request_s=1e-5,
)


def bursts(groups: int = 6, gap_ms: int = 2400, seed: int = 3) -> list[bytes]:
    """Every group has a prefix of its own behind one that all share, asked for by three clients within 3 ms, before any
    of its blocks can exist, by another while they are being made, and by one more in the next group's time."""
    draw = random.Random(seed)
    ids = iter(range(1, 1 << 20))
    rows: list[tuple[int, list[int], int]] = []
    for group in range(groups):
        shared = [0, *(next(ids) for _ in range(draw.randint(2, 4)))]
        for late_ms in (0, 1, 3, 320, gap_ms + 800):
            own = [next(ids) for _ in range(draw.randint(0, 1))]
            rows.append((group * gap_ms + late_ms, shared + own, draw.randint(1, 511)))
    return [
        json.dumps(
            {
                "timestamp": at_ms,
                "input_length": TRACE_BLOCK_TOKENS * len(blocks) + tail,
                "output_length": 3,
                "hash_ids": [*blocks, next(ids)],
            }
        ).encode()
        for at_ms, blocks, tail in sorted(rows)
    ]


def simulated(requests: list[TraceRequest], **config: Any) -> dict[str, Any]:
    config = {
        "prefill": PREFILL, "decode": DECODE, "keep_blocks": True, "cost": "toy",
        "chunk_tokens": CHUNK_TOKENS, "max_prefills": MAX_PREFILLS,
        "kv_tokens": KV_BYTES // TOKEN_BYTES, "pool_tokens": KV_BYTES // TOKEN_BYTES,
    } | config  # fmt: skip
    run = SimulatedCluster(SimulationConfig(**config), requests)
    run.run()
    run.check()
    return report(run)


async def replayed(house: Cluster, requests: list[TraceRequest]) -> tuple[dict[str, Any], list[TraceRequest]]:
    """On the live cluster, each when its time has come; and the requests with the times at which they were sent."""
    sent: dict[int, float] = {}
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=house.url, timeout=60.0, trust_env=False) as client:
        began = loop.time()

        async def one(request: TraceRequest) -> dict[str, Any]:
            body = {
                "model": "toy", "prompt": prompt(request), "max_tokens": request.output_tokens,
                "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            await asyncio.sleep(max(0.0, began + request.arrival_s - loop.time()))
            sent[request.number] = loop.time() - began
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            usage: dict[str, Any] = response.json()["usage"]
            assert usage["prompt_tokens"] == request.prompt_tokens
            return usage

        usages = await asyncio.gather(*(one(request) for request in requests))
    tokens = sum(u["prompt_tokens"] for u in usages)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    told = {"completed": len(usages), "prompt_tokens": tokens, "hit_rate": cached / tokens}
    in_order = sorted(requests, key=lambda request: sent[request.number])
    return told, [replace(r, number=i, arrival_s=sent[r.number]) for i, r in enumerate(in_order)]


def prompt(request: TraceRequest) -> list[int]:
    """Token ids of which equal blocks are equal, and what is behind the last full one is nobody else's."""
    blocks = [*request.block_keys, b"tail of %d" % request.number]
    ids = [id_ for key in blocks for id_ in random.Random(key).choices(range(97, 123), k=TRACE_BLOCK_TOKENS)]
    return ids[: request.prompt_tokens]


@pytest.mark.slow
async def test_simulator_and_live_run_have_the_same_hit_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "toy", TOY)
    requests = list(parse_trace(bursts()))
    compute = {"block_tokens": TRACE_BLOCK_TOKENS, "kv_bytes": KV_BYTES}
    fields: dict[Any, Any] = {
        "conductor": {"inline_tokens": 0, "pool_answers": "false"},
        "prefill": compute | {"chunk_tokens": CHUNK_TOKENS, "max_running": MAX_PREFILLS},
        "decode": compute,
        "cache": {"pool_bytes": KV_BYTES},
    }
    model = f"toy:step_ms={STEP_MS},prefill_us={TOKEN_US}"
    with cluster(
        tmp_path, prefill=PREFILL, decode=DECODE, cache=PREFILL, model=model, fields=fields
    ) as house:
        live, sent = await replayed(house, requests)
        house.wait_idle()
    expected = simulated(sent)
    assert expected["completed"] == len(requests)
    assert live["prompt_tokens"] == expected["prompt_tokens"]
    assert live["hit_rate"] == pytest.approx(expected["hit_rate"], abs=0.02)
    assert expected["hit_rate"] < too_good(requests) - 0.1


def too_good(requests: list[TraceRequest]) -> float:
    """Hit rate if blocks could be hit from their request's arrival on."""
    known: set[bytes] = set()
    hits = 0
    for request in requests:
        hits += sum(TRACE_BLOCK_TOKENS for key in request.block_keys if key in known)
        known.update(request.block_keys)
    return hits / sum(request.prompt_tokens for request in requests)
