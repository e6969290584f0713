"""Prefill, decode and cache nodes as processes on a real nats-server, with the toy engine and a test-driven gateway.

The toy engine's text depends on the KV it reads back from its pages, so equal text means that the right KV arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.engine.api import EngineConfig
from shared.engine.load import load_engine
from shared.protocol import subjects
from shared.protocol.errors import TsukimiError
from shared.protocol.requests import Accepted, PrefillJob
from tests.support.engine.sequences import Sequences
from tests.support.fakes.hand_gateway import GREEDY, HandGateway, hand_gateway
from tests.support.processes.nats import NatsServer
from tsukimi.replay import replay

BLOCK = 16
SLICE_BYTES = 2 * BLOCK * 16


def prompt_of(tokens: int, salt: int = 0) -> list[int]:
    return [97 + (i * 7 + i // 11 + salt * 5) % 26 for i in range(tokens)]


def reference(prompt: list[int], count: int) -> list[int]:
    engine = load_engine(
        EngineConfig(model="toy", kv_bytes=1 << 20, block_tokens=BLOCK), lambda what, part: None
    )
    try:
        return Sequences(engine).generate([prompt], count, samples=[GREEDY])[0]
    finally:
        engine.close()


@pytest.fixture
async def gateway(nats: NatsServer, tmp_path: Path) -> AsyncIterator[HandGateway]:
    async with hand_gateway(tmp_path, nats.url) as gateway:
        yield gateway


@pytest.fixture
async def cluster(gateway: HandGateway) -> HandGateway:
    for node in ("cache-0", "prefill-0", "decode-0"):
        gateway.workers.start(node, **({"chunk_tokens": 64} if node == "prefill-0" else {}))
    await gateway.ready("cache-0", "prefill-0", "decode-0")
    return gateway


async def test_the_way_of_a_request_and_its_second_turn(gateway: HandGateway) -> None:
    cluster = gateway
    # At this pace one layer of a chunk takes 64 ms, so the layer before it can arrive meanwhile.
    cluster.workers.start("prefill-0", chunk_tokens=64, model="toy:prefill_us=4000")
    for node in ("cache-0", "decode-0"):
        cluster.workers.start(node)
    await cluster.ready("cache-0", "prefill-0", "decode-0")
    prompt = prompt_of(200)
    attempt = await cluster.submit(prompt, 40)
    await cluster.ended(attempt)
    answer = cluster.said(attempt)
    assert answer == reference(prompt, 40)
    assert (cluster.finish(attempt), cluster.cached(attempt)) == ("length", 0)
    assert {b.node for b in cluster.batches} == {"prefill-0", "decode-0"}
    await cluster.idle("prefill-0", "decode-0")

    # Check that the work was really disaggregated: which node computed what, and what was moved.
    assert cluster.counter("decode-0", "prompt_tokens_computed") == 0
    assert cluster.counter("prefill-0", "prompt_tokens_computed") == 200
    assert cluster.counter("decode-0", "bytes_received") >= 13 * 4 * SLICE_BYTES
    early = cluster.counter("prefill-0", "layer_slices_sent_before_last_layer")
    assert early >= 13 * 3
    first_slice = cluster.counter("decode-0", "landing_first_slice_at_s")
    assert 0 < first_slice < cluster.counter("prefill-0", "last_layer_at_s")

    # The cache node has the prompt's and the answer's blocks, so another prefill node finds them.
    text = prompt + answer
    cluster.workers.start("prefill-1")
    await cluster.ready("prefill-1")
    second = [*text, *prompt_of(20, 3)]
    known = (len(text) - 1) // BLOCK
    attempt = await cluster.submit(second, 10, prefill="prefill-1", cached=known)
    await cluster.ended(attempt)
    assert cluster.said(attempt) == reference(second, 10)
    assert cluster.cached(attempt) == known * BLOCK
    await cluster.idle("prefill-1", "decode-0")
    assert cluster.counter("prefill-1", "fetched_tokens") == known * BLOCK
    assert cluster.counter("prefill-1", "prompt_tokens_computed") == len(second) - known * BLOCK


async def test_and_2_1_every_length_by_every_way(cluster: HandGateway) -> None:
    for tokens in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49):
        prompt = prompt_of(tokens, tokens)
        want = reference(prompt, 3)
        for count in (1, 2, 3):
            assert await cluster.answer(prompt, count) == want[:count]
            assert await cluster.answer(prompt, count, local=True) == want[:count]
    await cluster.idle("prefill-0", "decode-0")
    ends = cluster.counter("prefill-0", "ended_moved") + cluster.counter("decode-0", "ended_moved")
    assert ends == 0


async def test_a_recorded_run_replays_to_identical_commands(gateway: HandGateway, tmp_path: Path) -> None:
    nodes = ("cache-0", "prefill-0", "decode-0")
    for node in nodes:
        gateway.workers.start(node, record=str(tmp_path / f"{node}.events"))
    await gateway.ready(*nodes)
    await asyncio.gather(*(gateway.answer(prompt_of(20 + 9 * i), 12, local=i == 2) for i in range(5)))
    cancelled = await gateway.submit(prompt_of(30), 5000)
    await gateway.until(lambda: len(gateway.said(cancelled)) > 3, "tokens come")
    await gateway.cancel(cancelled, "prefill-0", "decode-0")
    await gateway.idle("prefill-0", "decode-0")
    for node in nodes:
        await asyncio.to_thread(gateway.workers.terminate(node).wait, 15.0)
        result = replay(tmp_path / f"{node}.events")
        assert result.events > 10
        assert result.difference is None


async def test_many_at_once_come_out_as_if_alone(cluster: HandGateway) -> None:
    prompts = [prompt_of(5 + 13 * i, i % 3) for i in range(12)]
    answers = await asyncio.gather(*(cluster.answer(p, 20, local=i % 4 == 3) for i, p in enumerate(prompts)))
    assert answers == [reference(p, 20) for p in prompts]
    await cluster.idle("prefill-0", "decode-0")


async def test_a_scripted_failure_ends_that_request_alone(cluster: HandGateway) -> None:
    bad = await cluster.submit(list(b"please <<fail:3>>"), 20)
    good = asyncio.create_task(cluster.answer(prompt_of(40), 20))
    await cluster.ended(bad)
    assert cluster.finish(bad) == "failed"
    assert await good == reference(prompt_of(40), 20)
    await cluster.idle("prefill-0", "decode-0")


async def test_eos_as_the_first_token(cluster: HandGateway) -> None:
    attempt = await cluster.submit(list(b"<<say:>>"), 20)
    await cluster.ended(attempt)
    assert (cluster.said(attempt), cluster.finish(attempt)) == ([257], "stop")
    await cluster.cancel(attempt, "decode-0")
    await cluster.idle("prefill-0", "decode-0")


async def test_cancels_free_everything(gateway: HandGateway) -> None:
    gateway.workers.start("prefill-0", model="toy:prefill_us=2000", chunk_tokens=32)
    gateway.workers.start("decode-0", model="toy:step_ms=10")
    await gateway.ready("prefill-0", "decode-0")
    running = await gateway.submit(prompt_of(10), 1000)
    await gateway.until(lambda: len(gateway.said(running)) > 3, "tokens come")
    filling = await gateway.submit(prompt_of(300), 100)
    for attempt in (running, filling):
        await gateway.cancel(attempt, "prefill-0", "decode-0")
    await gateway.idle("prefill-0", "decode-0")
    assert gateway.finish(running) is gateway.finish(filling) is None
    assert await gateway.answer(prompt_of(30), 5) == reference(prompt_of(30), 5)


async def test_a_gateway_that_is_gone_owns_nothing(nats: NatsServer, tmp_path: Path) -> None:
    async with hand_gateway(tmp_path, nats.url) as gateway:
        gateway.workers.start("decode-0", model="toy:step_ms=10", gateway_lease_s=1.0)
        await gateway.ready("decode-0")
        attempt = await gateway.submit(prompt_of(10), 10_000, local=True)
        await gateway.until(lambda: len(gateway.said(attempt)) > 3, "tokens come")
        gateway.alive = False
        await gateway.idle("decode-0")
        assert gateway.counter("decode-0", "orphaned") == 1


async def test_a_lost_prefill_node_moves_its_attempts_and_decode_answers_syncs(
    gateway: HandGateway,
) -> None:
    gateway.workers.start("prefill-0", model="toy:prefill_us=5000", chunk_tokens=16)
    gateway.workers.start("decode-0", model="toy:step_ms=5")
    await gateway.ready("prefill-0", "decode-0")
    attempt = await gateway.submit(prompt_of(400), 10)
    await gateway.until(lambda: gateway.counter("decode-0", "bytes_received") > 0, "KV arrives")
    assert (await gateway.sync("decode-0", attempt)).state == "waiting"
    assert (await gateway.sync("decode-0", "never/0/0")).state == "unknown"
    gateway.workers.kill("prefill-0")
    await gateway.ended(attempt)
    assert gateway.finish(attempt) == "moved"
    await gateway.idle("decode-0")
    again = await gateway.submit(prompt_of(400), 10, local=True)
    await gateway.ended(again)
    assert gateway.said(again) == reference(prompt_of(400), 10)
    state = await gateway.sync("decode-0", again, 4)
    assert (state.state, state.delta and state.delta.tokens) == ("finished", tuple(gateway.said(again)[4:]))


async def test_a_lost_decode_node_moves_what_is_handed_to_it(gateway: HandGateway) -> None:
    gateway.workers.start("prefill-0", model="toy:prefill_us=2000", chunk_tokens=32)
    gateway.workers.start("decode-0")
    await gateway.ready("prefill-0", "decode-0")
    attempt = await gateway.submit(prompt_of(300), 10)
    gateway.workers.kill("decode-0")
    await gateway.ended(attempt)
    assert gateway.finish(attempt) == "moved"
    await gateway.idle("prefill-0")


async def test_a_lost_cache_node_costs_its_blocks_and_nothing_more(cluster: HandGateway) -> None:
    prompt = prompt_of(100)
    await cluster.answer(prompt, 30)
    cluster.workers.kill("cache-0")
    cluster.workers.start("prefill-1")
    await cluster.ready("prefill-1")
    attempt = await cluster.submit(prompt, 30, prefill="prefill-1", cached=6)
    await cluster.ended(attempt)
    assert cluster.said(attempt) == reference(prompt, 30)
    assert cluster.cached(attempt) == 0
    await cluster.idle("prefill-1", "decode-0")


async def test_another_life_answers_unavailable(cluster: HandGateway) -> None:
    spec = cluster.infos["prefill-0"].model
    assert spec is not None
    job = PrefillJob("a/0/0", "gateway-0", "g", "earlier-life", spec.namespace, b"a\0\0\0", (), GREEDY, 1)
    with pytest.raises(TsukimiError) as refused:
        await cluster.bus.request(subjects.prefill("prefill-0"), job, Accepted, 5.0)
    assert (refused.value.code, refused.value.retryable) == ("unavailable", True)


async def test_sigterm_finishes_short_answers_and_moves_long_ones(gateway: HandGateway) -> None:
    gateway.workers.start("cache-0")
    gateway.workers.start("decode-0", model="toy:step_ms=10", grace_s=3.0)
    await gateway.ready("cache-0", "decode-0")
    short = await gateway.submit(prompt_of(20), 40, local=True)
    long = await gateway.submit(prompt_of(30), 5000, local=True)
    await gateway.until(lambda: len(gateway.said(long)) > 3, "tokens come")
    process = gateway.workers.terminate("decode-0")
    await gateway.ended(short)
    await gateway.ended(long)
    assert (gateway.finish(short), gateway.finish(long)) == ("length", "moved")
    assert gateway.said(short) == reference(prompt_of(20), 40)
    assert await asyncio.to_thread(process.wait, 10.0) == 0
    await gateway.until(lambda: "decode-0" not in gateway.infos, "it said that it left")
    text = prompt_of(30) + gateway.said(long)

    # The blocks it had computed are on the cache node.
    gateway.workers.start("decode-1")
    await gateway.ready("decode-1")
    known = (len(text) - 1) // BLOCK
    attempt = await gateway.submit(text, 5, decode="decode-1", local=True, cached=known)
    await gateway.ended(attempt)
    assert gateway.said(attempt) == reference(text, 5)
    assert gateway.cached(attempt) == known * BLOCK


async def test_decoding_goes_on_while_the_bus_is_gone(nats: NatsServer, gateway: HandGateway) -> None:
    gateway.workers.start("decode-0", model="toy:step_ms=5", gateway_lease_s=1.0)
    await gateway.ready("decode-0")
    attempt = await gateway.submit(prompt_of(20), 400, local=True)
    await gateway.until(lambda: len(gateway.said(attempt)) > 3, "tokens come")
    nats.restart()
    answer: list[int] = []
    while len(answer) < 400:
        await asyncio.sleep(0.05)
        with contextlib.suppress(TsukimiError):  # a node may not have reconnected yet
            state = await gateway.sync("decode-0", attempt)
            assert state.state in ("running", "finished"), "its lease did not age meanwhile"
            answer = list(state.delta.tokens) if state.delta else []
    assert answer == reference(prompt_of(20), 400)


async def test_ready_only_after_a_token_and_not_while_wedged(gateway: HandGateway) -> None:
    gateway.workers.start("decode-0", model="toy:prefill_us=20000", wedged_after_s=0.5, chunk_tokens=256)
    await gateway.until(lambda: "decode-0" in gateway.infos, "it announces itself while it starts")
    await gateway.ready("decode-0")
    info = gateway.infos["decode-0"]
    assert info.model is not None
    assert info.kv_blocks > 0
    attempt = await gateway.submit(prompt_of(200), 3, local=True)
    await gateway.until(lambda: gateway.infos["decode-0"].detail == "wedged", "a step of 4 s is noticed")
    assert gateway.infos["decode-0"].stage != "ready"
    await gateway.ended(attempt)
    await gateway.ready("decode-0")


async def test_what_can_not_work_exits_with_the_configuration_code(gateway: HandGateway) -> None:
    for node, fields in (("prefill-0", {"model": "no/such/model"}), ("decode-0", {"kv_bytes": 10})):
        gateway.workers.start(node, **fields)
        process = gateway.workers.processes.pop(node)
        assert await asyncio.to_thread(process.wait, 60.0) == 78
