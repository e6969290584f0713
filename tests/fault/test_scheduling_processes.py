"""What clients of a cluster of processes see while nodes die, fill up, restart, or are asked for what cannot be."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.protocol import subjects
from shared.protocol.requests import Placement, PlaceRequest
from tests.support.processes.cluster import Cluster, Fields, cluster
from tests.support.processes.open_loop import open_loop
from tests.support.until import until

MODEL = "toy:step_ms=5,prefill_us=50"
SELDOM: Fields = {"heartbeat_s": 60, "lost_after_s": 240}
"""With heartbeats a minute apart, whatever is known sooner was asked for, or told when it changed."""
SELDOM_ALL: dict[Any, Fields] = dict.fromkeys(("gateway", "conductor", "prefill", "decode", "cache"), SELDOM)


def client(house: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=house.url, timeout=30.0, trust_env=False)


def body(prompt: str = "hello", max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


@pytest.mark.slow
@pytest.mark.parametrize("node", ["decode-0", "prefill-0"])
async def test_no_request_fails_because_a_node_is_killed_at_fifty_a_second(tmp_path: Path, node: str) -> None:
    with cluster(tmp_path, prefill=2, decode=3, cache=1, model=MODEL) as house:
        loading = asyncio.create_task(open_loop(house.url, 5.0, 50.0))
        await asyncio.sleep(1.5)
        house.kill(node)
        outcomes = await loading
        assert len(outcomes) == 250
        assert [o for o in outcomes if o] == [], house.logs()
        house.start(node)
        house.wait_ready()


async def test_a_node_that_was_full_gets_work_as_soon_as_all_cancel(tmp_path: Path) -> None:
    """Heartbeats are a minute apart: only the reports on change can tell the conductor."""
    fields = SELDOM_ALL | {"decode": {**SELDOM, "max_running": 2, "max_waiting": 2}}
    with cluster(tmp_path, decode=1, cache=0, model="toy:step_ms=20", fields=fields) as house:
        async with client(house) as http:
            long = [
                asyncio.create_task(http.post("/v1/completions", json=body(f"long {i}", 3000)))
                for i in range(4)
            ]
            await until(lambda: len(house.loads["decode-0"].attempts) == 4)
            refused = await http.post("/v1/completions", json=body())
            assert refused.status_code == 429, refused.text
            assert float(refused.headers["retry-after"]) > 0.0
            for request in long:
                request.cancel()
            await asyncio.gather(*long, return_exceptions=True)
            await until(lambda: not house.loads["decode-0"].attempts)
            answers = [await http.post("/v1/completions", json=body()) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200] * 4, answers[0].text


async def test_who_restarts_knows_six_workers_long_before_their_next_heartbeat(tmp_path: Path) -> None:
    with cluster(tmp_path, prefill=3, decode=3, cache=1, model=MODEL, fields=SELDOM_ALL) as house:
        lives = {node: house.infos[node].ref.incarnation for node in house.nodes()}
        house.restart("conductor-0", kill=True)
        house.wait_ready("conductor-0", timeout_s=20.0)
        workers = [(f"prefill-{i}", f"decode-{i}") for i in range(3)]
        for pair in workers:
            house.wait_for(lambda pair=pair: placed_on(house, *pair), 15.0, f"{pair} are known")  # type: ignore[misc]
        house.restart("gateway-0", kill=True)
        house.wait_ready(timeout_s=20.0)
        async with client(house) as http:
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body(f"n {i}")) for i in range(12))
            )
        assert [answer.status_code for answer in answers] == [200] * 12
        restarted = {node for node, life in lives.items() if house.infos[node].ref.incarnation != life}
        assert restarted == {"conductor-0", "gateway-0"}, "no worker had to restart"


def placed_on(house: Cluster, prefill: str, decode: str) -> bool:
    """Whether a request that has failed on all other workers is placed on these two."""
    lives = [
        (node, house.infos[node].ref.incarnation)
        for node in (*house.nodes("prefill"), *house.nodes("decode"))
    ]
    avoid = tuple(life for life in lives if life[0] not in (prefill, decode))
    request = PlaceRequest(f"{uuid.uuid4()}/0/1", "toy", 320, (), 50, 9.0, avoid)
    placement: Placement = house.observer.request(subjects.PLACE, request, Placement)
    return [ref.node for ref in (placement.prefill, placement.decode) if ref is not None] == [prefill, decode]


async def test_what_can_never_fit_is_the_clients_mistake_and_harms_nobody(tmp_path: Path) -> None:
    """No node is blamed for it: all get work as before."""
    small: Fields = {"kv_bytes": 1 << 20}
    fields: dict[Any, Fields] = {"prefill": small, "decode": small}
    with cluster(tmp_path, prefill=1, decode=2, cache=0, model=MODEL, fields=fields) as house:
        loading = asyncio.create_task(open_loop(house.url, 3.0, 20.0))
        async with client(house) as http:
            most = max(house.infos[node].kv_blocks for node in house.nodes("decode"))
            refused = [await http.post("/v1/completions", json=body("x " * 40_000)) for _ in range(10)]
            assert {answer.status_code for answer in refused} <= {400, 413}, (most, refused[0].text)
            assert (await http.post("/v1/completions", json=body())).status_code == 200
        assert [o for o in await loading if o] == [], house.logs()
        assert "suspect" not in house.log_path("conductor-0").read_text()
        assert "node_lost" not in house.log_path("gateway-0").read_text()
