"""When a node behind a gateway dies, clients see only a pause: the text equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shared.protocol.errors import Overloaded, Unavailable
from shared.protocol.requests import TokenDelta
from tests.support.fakes.fake_cluster import FakeCluster, memory_cluster, nats_cluster
from tests.support.processes.nats import NatsServer, nats_server
from tests.support.until import until
from tsukimi.replay import replay

TEXT = "for ever"
BODY: dict[str, Any] = {
    "model": "toy", "prompt": TEXT, "max_tokens": 60, "temperature": 0.8, "seed": 3, "logprobs": 0,
}  # fmt: skip
QUICK = {"idle_sync_s": 0.1, "lost_after_s": 0.6, "call_s": 0.5}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with memory_cluster(**QUICK) as cluster:
        await cluster.add_prefill("prefill-1")
        await cluster.add_decode("decode-1")
        yield cluster
        await cluster.idle()


async def ask(cluster: FakeCluster, **more: Any) -> dict[str, Any]:
    response = await cluster.http.post("/v1/completions", json=BODY | more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return {"choices": answer["choices"], "usage": answer["usage"]}


async def undisturbed_and(
    cluster: FakeCluster, disturb: Callable[[], Awaitable[None]], requests: int = 4, token_s: float = 0.01
) -> None:
    """Run requests undisturbed, run them again while disturbing, and compare the answers."""
    seeds = range(requests)
    expected = [await ask(cluster, seed=seed) for seed in seeds]
    cluster.slow_down(token_s)
    running = [asyncio.create_task(ask(cluster, seed=seed)) for seed in seeds]
    await until(lambda: sum(len(w.made) for d in cluster.decodes for w in d.work.values()) >= 5 * requests)
    await disturb()
    assert [await task for task in running] == expected


async def test_a_decode_node_is_killed(cluster: FakeCluster) -> None:
    async def kill() -> None:
        await cluster.decodes[0].stop()

    await undisturbed_and(cluster, kill)
    await cluster.idle()  # the counter changes at the end of the request, which the client may see earlier
    assert cluster.sample("tsukimi_gateway_events_total", event="retries") >= 1


async def test_a_decode_node_comes_back_under_its_name(cluster: FakeCluster) -> None:
    async def restart() -> None:
        await cluster.decodes[0].stop()
        node = await cluster.add_decode("decode-0")
        node.token_s = 0.01

    await undisturbed_and(cluster, restart)


async def test_the_only_decode_node_is_down_for_a_while() -> None:
    async with memory_cluster(**QUICK) as cluster:

        async def restart() -> None:
            await cluster.decodes[0].stop()
            await asyncio.sleep(1.0)
            await cluster.add_decode("decode-0")

        await undisturbed_and(cluster, restart)


async def test_a_prefill_node_is_killed_with_jobs_waiting(cluster: FakeCluster) -> None:
    expected = [await ask(cluster, seed=seed) for seed in range(6)]
    for node in cluster.prefills:
        node.token_s = 3600.0
    running = [asyncio.create_task(ask(cluster, seed=seed)) for seed in range(6)]
    await until(lambda: sum(len(p.work) for p in cluster.prefills) == 6)
    await cluster.prefills[0].stop()
    cluster.prefills[1].token_s = 0.0
    stuck = cluster.prefills[1]
    await stuck.stop()
    await cluster.add_prefill("prefill-1")
    assert [await task for task in running] == expected


async def test_a_decode_node_drains(cluster: FakeCluster) -> None:
    async def drain() -> None:
        await cluster.decodes[0].announce("draining")
        await cluster.decodes[0].give_up_all()
        await cluster.decodes[0].leave()

    await undisturbed_and(cluster, drain)


async def test_the_conductor_is_away_for_a_while(cluster: FakeCluster) -> None:
    async def lose() -> None:
        await cluster.conductor.stop()
        late = asyncio.create_task(ask(cluster, seed=0))
        await cluster.decodes[0].stop()
        await asyncio.sleep(0.5)
        await cluster.add_conductor()
        await late

    await undisturbed_and(cluster, lose)


@pytest.mark.parametrize("nth", [2, 3])
async def test_lost_messages_are_asked_for(cluster: FakeCluster, nth: int) -> None:
    count = 0

    def lose(_: TokenDelta) -> bool:
        nonlocal count
        count += 1
        return count % nth == 0

    async def disturb() -> None:
        for node in (*cluster.prefills, *cluster.decodes):
            node.lose = lose

    await undisturbed_and(cluster, disturb)
    late = await ask(cluster, seed=1, max_tokens=10)  # this one may lose its first or last token too
    for node in (*cluster.prefills, *cluster.decodes):
        node.lose = lambda _: False
    assert late == await ask(cluster, seed=1, max_tokens=10)


async def test_every_token_of_prefill_is_lost(cluster: FakeCluster) -> None:
    expected = await ask(cluster)
    for node in cluster.prefills:
        node.lose = lambda _: True
    assert await ask(cluster) == expected


async def test_a_full_decode_node_is_passed_over(cluster: FakeCluster) -> None:
    expected = [await ask(cluster, seed=s) for s in range(4)]
    cluster.decodes[0].refuse = Overloaded("full", retry_after_s=7.0)
    assert [await ask(cluster, seed=s) for s in range(4)] == expected
    cluster.decodes[1].refuse = Overloaded("full", retry_after_s=7.0)
    response = await cluster.http.post("/v1/completions", json=BODY)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert not cluster.prefills[0].work


async def test_a_refused_prefill_frees_the_reservation(cluster: FakeCluster) -> None:
    for node in cluster.prefills:
        node.refuse = Unavailable("not now")
    waiting = asyncio.create_task(ask(cluster))
    await until(lambda: sum(len(d.cancelled) for d in cluster.decodes) >= 3)
    for node in cluster.prefills:
        node.refuse = None
    await waiting


async def test_time_runs_out_with_an_error_that_says_so() -> None:
    async with memory_cluster(budget_s=0.5) as cluster:
        cluster.conductor.refuse = Unavailable("no node serves it")
        response = await cluster.http.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert "no node serves it" in response.json()["error"]["message"]
        cluster.conductor.refuse = None
        cluster.slow_down(1.0)
        assert (await cluster.http.post("/v1/completions", json=BODY)).status_code == 504
        await cluster.idle()


# -- the bus ---------------------------------------------------------------------------------------------------------


async def test_nats_server_is_killed_and_comes_back() -> None:
    async with nats_server() as server, nats_cluster(server, **QUICK) as cluster:

        async def restart() -> None:
            await outage(server, 1.5)

        await undisturbed_and(cluster, restart, requests=3, token_s=0.03)
        await cluster.idle()
        assert cluster.sample("tsukimi_requests_ended_total", outcome="ok") == 6


async def test_a_request_that_arrives_while_the_bus_is_down_waits_for_it() -> None:
    async with nats_server() as server, nats_cluster(server, **QUICK) as cluster:
        expected = await ask(cluster)
        await asyncio.to_thread(server.kill)
        await until(lambda: cluster.gateway.missing())
        waiting = asyncio.create_task(ask(cluster))
        await asyncio.sleep(0.3)
        server.start()
        assert await waiting == expected
        await cluster.idle()


async def outage(server: NatsServer, seconds: float) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(seconds)
    server.start()


# -- recordings ------------------------------------------------------------------------------------------------------


async def test_a_recorded_run_with_a_failover_replays_identically(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.record"
    async with memory_cluster(**QUICK, record=str(recording)) as cluster:
        await cluster.add_decode("decode-1")

        async def kill() -> None:
            await cluster.decodes[0].stop()

        await undisturbed_and(cluster, kill)
        await cluster.idle()
    result = replay(recording)
    assert result.difference is None
    assert result.restarts == 7  # eight choices, one machine each, one after the other
    assert result.events > 8 * 60
