"""A hundred streams leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.ask import many, stream
from tests.support.engine.prompts import english_ids
from tests.support.processes.launched import Launched, launched

STREAMS, AT_ONCE, NEW_TOKENS = 100, 16, 64


def _rss(cluster: Launched) -> dict[str, int]:
    return {n["node"]: psutil.Process(n["pid"]).memory_info().rss for n in cluster.status()["nodes"]}


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_hundred_streams_sixteen_at_a_time(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--model", "smollm2-135m", "--set", "decode.threads=2") as cluster:
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=cluster.url, limits=limits) as client:
            runs, rss = [], []
            for run in range(2):
                prompts = [english_ids(20 + i % 7, skip=40 * i + run) for i in range(STREAMS)]
                jobs = [lambda p=p: stream(client, p, NEW_TOKENS) for p in prompts]
                answers = await many(client, jobs, AT_ONCE)
                assert all(a.finish_reason == "length" and a.completion_tokens == NEW_TOKENS for a in answers)
                assert all(len(a.token_ids) == NEW_TOKENS for a in answers)
                cluster.wait_idle()
                assert json.loads(cluster.tsukimi("status", "--json"))["kv_blocks_held"] == 0
                runs.append(answers)
                rss.append(_rss(cluster))
    growth = {node: rss[1][node] / rss[0][node] - 1 for node in rss[0]}
    print({node: f"{g:+.2%}" for node, g in growth.items()})
    assert all(g <= 0.05 for g in growth.values()), growth
