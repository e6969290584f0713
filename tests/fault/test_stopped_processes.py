"""Processes that are stopped for seconds and go on: a request may be late, and none fails."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from shared.io.nats_bus import connect
from shared.protocol import subjects
from shared.protocol.cluster import NodeLeft
from tests.support.processes.cluster import cluster
from tests.support.processes.open_loop import open_loop

MODEL = "toy:step_ms=5,prefill_us=100"
PAUSES_S = {"conductor-0": 15.0, "gateway-0": 12.0, "prefill-0": 7.0, "decode-0": 7.0, "cache-0": 7.0}
"""Longer than nodes may be silent, and longer than a gateway waits for a placement; the gateway's is longer than its
lease at the nodes."""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("node", PAUSES_S)
async def test_no_request_fails_because_a_process_was_stopped(tmp_path: Path, node: str) -> None:
    with cluster(tmp_path, prefill=2, decode=2, cache=1, model=MODEL) as house:
        loading = asyncio.create_task(open_loop(house.url, PAUSES_S[node] + 6.0, 10.0))
        await asyncio.sleep(2.0)
        house.send_signal(node, signal.SIGSTOP)
        await asyncio.sleep(PAUSES_S[node])
        house.send_signal(node, signal.SIGCONT)
        outcomes = await loading
        assert [o for o in outcomes if o] == [], house.logs()
        house.wait_idle()
        if node == "conductor-0":
            counters = house.counters("conductor")
            assert counters["expired"] >= 80, (
                "each of those that waited longest asked three times, and was read once"
            )
            assert counters["placed"] <= len(outcomes) + 10, "no place is booked for those that gave up"


async def test_nodes_that_somebody_else_says_have_left_are_back_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, prefill=1, decode=1, cache=1, model=MODEL) as house:
        url = house.url
        bus = await connect(house.nats.url, name="forger")
        try:
            lives = {node: house.infos[node].ref.incarnation for node in house.nodes()}
            for node, life in lives.items():
                await bus.publish(subjects.LEAVE, NodeLeft(node, life))
        finally:
            await bus.close()
        await asyncio.sleep(0.2)
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            body = {"model": "toy", "prompt": "are you there", "max_tokens": 4}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
        house.wait_for(lambda: set(house.infos) >= set(lives), 20.0, "all have announced themselves again")
        house.wait_ready()
        assert {node: house.infos[node].ref.incarnation for node in lives} == lives, "none had to restart"
