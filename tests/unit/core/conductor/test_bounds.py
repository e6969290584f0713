"""However much is asked, the conductor remembers little, and people get an answer that says when to come again."""

from __future__ import annotations

import tracemalloc

from shared.core.conductor.objectives import Objectives
from shared.core.machine import Ticked
from shared.protocol.errors import RETRY_LEAST_S, RETRY_MOST_S, WireError
from shared.protocol.requests import Placement
from tests.support.worlds.cluster_of import ClusterOf, keys

BLOCKS = 4


def unique(number: int) -> tuple[bytes, ...]:
    first = 1_000 + number * BLOCKS
    return keys(*range(first, first + BLOCKS))


def serve(cluster: ClusterOf, first: int, count: int) -> None:
    """Prompts that nobody sent before, ten in a tenth of a second. Each is computed, kept, and its answer ends."""
    for number in range(first, first + count):
        cluster.now += 0.01
        asked = {"asker": f"g{number % 3}", "asked_at_s": cluster.now, "waits_s": 5.0}
        placement = cluster.place(BLOCKS * 16 + 1, unique(number), attempt=f"r{number}/0/0", **asked)
        assert placement.pool is not None
        cluster.stored(placement.pool.node, unique(number))
        if number % 10 == 0:
            for i in range(2):
                cluster.report(f"p-{i}", "prefill")
                cluster.report(f"d-{i}", "decode")
                cluster.report(f"c-{i}", "cache")
            cluster.feed(Ticked())
        cluster.commands.clear()


def test_prompts_that_never_repeat_leave_no_more_behind_than_the_bounds_allow() -> None:
    tracemalloc.start()
    try:
        cluster = ClusterOf(2, 2, 2, index_blocks=1000, decisions_kept=100)
        serve(cluster, 0, 2000)
        before, _ = tracemalloc.get_traced_memory()
        serve(cluster, 2000, 4000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cluster.machine.index) <= 1000
    assert after - before < 4000 * 50, "less than fifty bytes for each of the later prompts"
    cluster.machine.check()


def test_two_thousand_questions_at_once_are_placed_or_told_when_to_come_again() -> None:
    cluster = ClusterOf(4, 4, objectives=Objectives(max_wait_s=30.0))
    for node in range(4):
        cluster.report(f"p-{node}", "prefill", cost_samples=99)
        cluster.report(f"d-{node}", "decode", cost_samples=99)
    answers = [cluster.ask(1000, unique(i), attempt=f"r{i}/0/0") for i in range(2000)]
    refusals = [answer for answer in answers if isinstance(answer, WireError)]
    assert {refusal.code for refusal in refusals} == {"overloaded"}
    assert all(RETRY_LEAST_S <= (r.retry_after_s or 0.0) <= RETRY_MOST_S for r in refusals)
    placed = [answer for answer in answers if isinstance(answer, Placement)]
    assert 4 * 30 <= len(placed) <= 4 * 32, "thirty seconds of work for each prefill node"
