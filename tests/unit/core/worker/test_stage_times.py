"""What a prompt's stages took, as its node tells with the first token; and what it times of its fetches."""

from __future__ import annotations

import pytest

from shared.core.worker.transfers import BlocksFetched
from shared.protocol.cluster import CostCoefficients, LinkTotals
from shared.protocol.ids import NodeRef
from shared.protocol.requests import BlockSource, StageTimes
from tests.support.worlds.workers import (
    CACHE,
    Bench,
    decode_bench,
    job,
    prefill_bench,
    prompt_of,
    reserve,
    source,
)

NEAR = NodeRef("cache-1", "c2", host="alpha")
FAR = NodeRef("cache-2", "c3", host="beta")
COST = CostCoefficients(prefill_token_s=0.01, load_token_s=0.001, step_fixed_s=0.1)


def after(bench: Bench, seconds: float) -> Bench:
    bench.now += seconds
    return bench


def told(bench: Bench) -> StageTimes:
    (stages,) = [d.stages for d in bench.deltas if d.stages is not None]
    return stages


def test_pulling_loading_waiting_and_computing_are_told_apart() -> None:
    b = prefill_bench(host="alpha", max_running=1)
    b.submit(job("before", prompt_of(4)))
    b.submit(job("a", prompt_of(16, salt=1), sources=(source(0, 1, NEAR), source(1, 1, FAR))))
    after(b, 3.0).run()
    b.deltas.clear()
    b.do(BlocksFetched("before", 0, 0))
    after(b, 0.25).do(BlocksFetched("a", 0, 1, seconds=0.25, turn=1))
    after(b, 1.5).do(BlocksFetched("a", 1, 1, seconds=1.5, turn=2))
    after(b, 2.0).run()
    stages = told(b)
    assert stages.queue_s == pytest.approx(3.0)
    assert stages.transfer_s == pytest.approx(1.5)
    assert stages.prefill_s == pytest.approx(0.25 + 2.0)


def test_waiting_for_blocks_that_are_computed_elsewhere_is_queueing() -> None:
    b = prefill_bench(host="alpha")
    b.submit(job("a", prompt_of(12), sources=(BlockSource(FAR, 0, 2, ready_in_s=5.0),)))
    after(b, 6.0).do(BlocksFetched("a", 0, 2, seconds=6.0, turn=1))
    after(b, 1.0).run()
    assert told(b) == StageTimes(6.0, 0.0, 1.0)
    assert b.machine.load(b.now).fetched_far == LinkTotals()


def test_a_decode_node_that_prefills_tells_too_and_one_that_only_decodes_does_not() -> None:
    b = decode_bench()
    after(b, 50.0).submit(reserve("a", prompt_of(6), local=True))
    after(b, 2.0).run()
    assert told(b) == StageTimes(0.0, 0.0, 2.0)
    after(b, 1.0).run()
    assert told(b) == StageTimes(0.0, 0.0, 2.0)


def test_fetches_are_timed_by_the_kind_of_link() -> None:
    b = prefill_bench(host="alpha", cost=COST)
    b.submit(job("a", prompt_of(16), sources=(source(0, 1, NEAR), source(1, 2, FAR))))
    b.do(BlocksFetched("a", 0, 1, seconds=0.25, turn=1))
    b.do(BlocksFetched("a", 1, 2, seconds=1.5, turn=2))
    load = b.machine.load(b.now)
    assert (load.fetched_near, load.fetched_far) == (LinkTotals(1, 1, 0.25), LinkTotals(1, 2, 1.5))


def test_only_loads_from_the_own_host_are_in_the_time_model_that_is_told() -> None:
    """The conductor adds the link's time to what is pulled from elsewhere: it must not count twice."""
    b = prefill_bench(host="alpha", cost=COST)
    only_first = {"handoff": None, "pool": None, "max_new_tokens": 1}
    for i in range(20):
        name, prompt = f"r{i}", prompt_of(16, salt=i)
        b.submit(job(name, prompt, sources=(source(0, 1, NEAR), source(1, 2, FAR)), **only_first))
        b.do(BlocksFetched(name, 0, 1, seconds=0.02, turn=1))
        b.do(BlocksFetched(name, 1, 2, seconds=8.0, turn=2))
        b.run()
    cost = b.machine.load(b.now).cost
    assert cost is not None
    assert cost.load_token_s == pytest.approx(0.02 / 4, rel=0.05)
    b.submit(job("far", prompt_of(16, salt=77), sources=(source(0, 2, FAR),)))
    far_s = b.machine.load(b.now).queue_s
    assert far_s > 7.0, "the node's own queue does count what it takes"


def test_who_does_not_say_where_it_is_has_no_neighbours() -> None:
    b = prefill_bench(cost=COST)
    b.submit(job("a", prompt_of(16), sources=(source(0, 1, CACHE),)))
    b.do(BlocksFetched("a", 0, 1, seconds=0.25, turn=1))
    assert b.machine.load(b.now).fetched_far.fetches == 1
