"""What a node says of its queue: work that is out counts by how far it has come, and waits count as waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.worker.transfers import BlocksFetched, FetchBlocks
from shared.protocol.cluster import CostCoefficients
from shared.protocol.requests import BlockSource
from tests.support.worlds.workers import (
    CACHE,
    Bench,
    decode_bench,
    job,
    only,
    prefill_bench,
    prompt_of,
    reserve,
    source,
)

COST = CostCoefficients(
    prefill_fixed_s=0.5,
    prefill_token_s=1.0,
    load_token_s=0.1,
    step_fixed_s=0.25,
    step_request_s=0.25,
)
"""A prompt of n tokens in one chunk takes n + 0.5 s."""


def bench(**fields: int) -> Bench:
    return prefill_bench(cost=COST, fit_cost=False, chunk_tokens=100, **fields)


def queue_s(bench: Bench) -> float:
    return bench.machine.load(bench.now).queue_s


def test_the_running_step_counts_by_what_is_left_of_it() -> None:
    b = bench(max_running=1)
    b.submit(job("a", prompt_of(8)))
    b.submit(job("b", prompt_of(4, salt=1)))
    assert queue_s(b) == pytest.approx(8.5 + 4.5)
    b.now += 6.0
    assert queue_s(b) == pytest.approx(2.5 + 4.5)
    b.now += 60.0  # a step that takes longer than predicted is nearly done, and does not eat up the others
    assert queue_s(b) == pytest.approx(4.5)
    b.run()
    assert queue_s(b) == pytest.approx(4.5)


def test_every_chunk_has_the_fixed_cost_of_a_step() -> None:
    b = prefill_bench(cost=COST, fit_cost=False, chunk_tokens=8)
    b.submit(job("a", prompt_of(20)))
    assert queue_s(b) == pytest.approx(20 + 3 * 0.5)
    b.now += 4.25
    assert queue_s(b) == pytest.approx(20 + 3 * 0.5 - 4.25)
    b.now += 4.25
    b.run()
    assert queue_s(b) == pytest.approx(12 + 2 * 0.5)


def test_a_fetch_that_is_out_counts_by_what_is_left_of_it() -> None:
    b = bench()
    fetch = only(b.submit(job("a", prompt_of(10), sources=(source(0, 2),))), FetchBlocks)[0]
    assert queue_s(b) == pytest.approx(8 * 0.1 + 2.5)
    b.now += 0.5
    assert queue_s(b) == pytest.approx(0.3 + 2.5)
    b.do(BlocksFetched("a", 0, 2, seconds=0.8, turn=fetch.turn))
    assert queue_s(b) == pytest.approx(2.5)


def test_blocks_that_are_still_being_computed_are_waited_for() -> None:
    b = bench(max_running=1)
    waited = BlockSource(CACHE, 0, 2, ready_in_s=7.0)
    b.submit(job("a", prompt_of(10), sources=(waited,)))
    b.submit(job("b", prompt_of(4, salt=1), sources=(BlockSource(CACHE, 0, 0, ready_in_s=0.1),)))
    assert queue_s(b) == pytest.approx(7.0 + 0.8 + 2.5 + 4.5)
    b.now += 5.0
    assert queue_s(b) == pytest.approx(2.0 + 0.8 + 2.5 + 4.5)


def test_the_wait_is_shorter_when_its_turn_comes_later() -> None:
    b = bench(max_running=1)
    b.submit(job("a", prompt_of(8)))
    b.submit(job("b", prompt_of(12, salt=1), sources=(BlockSource(CACHE, 0, 2, ready_in_s=7.0),)))
    b.now += 5.0
    (fetch,) = only(b.run(), FetchBlocks)
    assert fetch.source.ready_in_s == pytest.approx(2.0)


def test_a_short_prompt_is_computed_while_the_first_one_waits_for_blocks() -> None:
    b = bench(max_running=1)
    b.submit(job("waits", prompt_of(10), sources=(BlockSource(CACHE, 0, 2, ready_in_s=7.0),)))
    b.submit(job("long", prompt_of(9, salt=1)))
    assert b.step is None, "a long one would make the first one late"
    b.submit(job("short", prompt_of(4, salt=2)))
    assert b.step is not None
    assert [s.attempt for s in b.step.sequences] == ["short"]
    b.now += 4.5
    b.run()
    assert b.step is None
    b.do(BlocksFetched("waits", 0, 2, seconds=7.0, turn=1))
    assert b.step is not None
    assert [s.attempt for s in b.step.sequences] == ["waits"]
    b.run()
    assert b.step is not None
    assert [s.attempt for s in b.step.sequences] == ["long"]


def test_a_decode_node_counts_its_batch_in_every_chunk() -> None:
    b = decode_bench(cost=replace(COST, step_request_s=2.0), fit_cost=False, chunk_tokens=8)
    b.submit(reserve("a", prompt_of(4), local=True))
    assert queue_s(b) == pytest.approx(4.5)
    b.run()
    assert queue_s(b) == 0.0
    b.submit(reserve("b", prompt_of(16, salt=1), local=True))
    beside_s = 0.25 + 2.0 - 0.5
    assert queue_s(b) == pytest.approx(16 + 2 * 0.5 + 2 * beside_s)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    elapsed=st.lists(st.floats(0, 40), min_size=8),
)
def test_time_and_steps_never_make_the_queue_longer(lengths: list[int], elapsed: list[float]) -> None:
    b = prefill_bench(cost=COST, fit_cost=False, chunk_tokens=8, pages=200)
    for i, n in enumerate(lengths):
        b.submit(job(f"r{i}", prompt_of(n, salt=i)))
    before = queue_s(b)
    for seconds in elapsed:
        b.now += seconds
        after = queue_s(b)
        assert 0.0 <= after <= before + 1e-9
        before = after
        if b.step is not None:
            b.run()
            assert queue_s(b) <= before + 1e-6
            before = queue_s(b)
