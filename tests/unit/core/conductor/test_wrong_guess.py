"""A time model that is ten times too slow keeps no idle node from work."""

from __future__ import annotations

from msgspec.structs import replace

from shared.core.conductor.objectives import Objectives
from shared.protocol.cluster import CostCoefficients
from shared.protocol.errors import WireError
from tests.support.worlds.cluster_of import COST, ClusterOf

SLOW = replace(COST, prefill_token_s=10 * COST.prefill_token_s, prefill_fixed_s=10 * COST.prefill_fixed_s)
TTFT_S = 2.0
PROMPT = 1000
"""Takes a second; ten seconds by the wrong guess."""


def refused(cluster: ClusterOf, count: int, cost: CostCoefficients, samples: int) -> int:
    """How many of so many requests are refused, each on idle nodes that report this time model."""
    found = 0
    for _ in range(count):
        cluster.now += 3.0
        cluster.report("p-0", "prefill", cost=cost, cost_samples=samples)
        cluster.report("d-0", "decode", cost=COST, cost_samples=99)
        found += isinstance(cluster.ask(PROMPT), WireError)
    return found


def test_a_guess_refuses_nothing_a_wrong_measure_at_most_its_share_a_right_one_nothing() -> None:
    objectives = Objectives(ttft_s=TTFT_S, min_samples=8, idle_refusals=0.5)
    cluster = ClusterOf(1, 1, objectives=objectives)
    assert refused(cluster, 200, SLOW, samples=0) == 0
    assert refused(cluster, 200, SLOW, samples=7) == 0
    assert 0 < refused(cluster, 200, SLOW, samples=99) <= 100
    assert refused(cluster, 200, COST, samples=99) == 0
    assert cluster.machine.let_through >= 500


def test_shadow_mode_refuses_nothing_and_says_what_it_would() -> None:
    objectives = Objectives(ttft_s=TTFT_S, min_samples=8, idle_refusals=1.0, shadow=True)
    cluster = ClusterOf(1, 1, objectives=objectives)
    assert refused(cluster, 100, SLOW, samples=99) == 0
    admission = cluster.machine._scheduler.admission
    assert admission.refused["ttft"] == 100
    assert refused(cluster, 100, COST, samples=99) == 0
    assert admission.refused["ttft"] == 100


def test_under_load_a_wrong_measure_refuses_until_it_is_corrected() -> None:
    """What it lets through while nodes are idle is what corrects it."""
    cluster = ClusterOf(1, 1, objectives=Objectives(ttft_s=TTFT_S))
    cluster.report("d-0", "decode", cost=COST, cost_samples=99)
    cluster.report("p-0", "prefill", cost=SLOW, cost_samples=99, attempts=("x/0/0",), queue_s=0.1)
    assert cluster.refused(PROMPT).code == "overloaded"
    cluster.report("p-0", "prefill", cost=COST, cost_samples=100, attempts=("x/0/0",), queue_s=0.1)
    assert cluster.place(PROMPT)
