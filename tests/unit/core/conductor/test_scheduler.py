from __future__ import annotations

import pytest

from shared.core.conductor.events import GivenUp
from shared.core.conductor.objectives import Objectives
from tests.support.worlds.cluster_of import BLOCK_TOKENS, ClusterOf, keys, names, ref

HEAD = keys(*range(128))


# -- placing -----------------------------------------------------------------------------------------------------------


def test_a_placement_names_nodes_pool_prediction_and_reason() -> None:
    cluster = ClusterOf(1, 1, 1)
    placement = cluster.place(100)
    assert names(placement) == ("p-0", "d-0")
    assert placement.pool == placement.decode_pool == ref("c-0", "h0")
    assert placement.sources == ()
    assert placement.policy == "kvcache_centric"
    assert placement.reason
    assert placement.predicted.ttft_s == pytest.approx(0.11)
    assert placement.predicted.tbt_s == pytest.approx(0.02 + 0.001 + 100e-6)


def test_without_cache_nodes_there_is_no_pool() -> None:
    placement = ClusterOf(1, 1).place()
    assert placement.pool is None
    assert placement.decode_pool is None


def test_one_token_needs_no_decode_node() -> None:
    assert names(ClusterOf(1, 1).place(max_new_tokens=1)) == ("p-0", None)
    assert names(ClusterOf(1, 0).place(max_new_tokens=1)) == ("p-0", None)


def test_a_prefix_on_another_host_is_pulled_and_its_copy_stays() -> None:
    cluster = ClusterOf(2, 1, 2)
    cluster.stored("c-1", HEAD[:10])
    cluster.report("p-1", "prefill", queue_s=50.0)
    placement = cluster.place(16 * 20, keys(*range(20)))
    assert names(placement)[0] == "p-0"
    assert [(s.holder.node, s.first_block, s.blocks) for s in placement.sources] == [("c-1", 0, 10)]
    assert placement.pool == ref("c-0", "h0")
    assert placement.cached_blocks == 10


def test_the_last_token_of_a_fully_cached_prompt_is_computed() -> None:
    cluster = ClusterOf(1, 1, 1)
    cluster.stored("c-0", HEAD[:4])
    assert cluster.place(4 * BLOCK_TOKENS, HEAD[:4]).cached_blocks == 3
    assert cluster.place(4 * BLOCK_TOKENS + 1, HEAD[:4]).cached_blocks == 4


def test_what_own_memory_holds_is_not_pulled_and_others_memory_cannot_be() -> None:
    cluster = ClusterOf(2, 1, 2)
    cluster.stored("p-0", HEAD[:6])
    cluster.stored("c-0", HEAD[6:8])
    cluster.stored("c-1", HEAD[:3])
    cluster.report("p-1", "prefill", queue_s=50.0)
    placement = cluster.place(16 * 20, keys(*range(20)))
    assert [(s.holder.node, s.first_block, s.blocks) for s in placement.sources] == [("c-0", 6, 2)]
    assert placement.cached_blocks == 8
    for _ in range(2):
        cluster.now += 3.0
        cluster.report("p-0", "prefill")
    cluster.report("p-1", "prefill", queue_s=0.0)
    cluster.report("p-0", "prefill", queue_s=50.0)
    placement = cluster.place(16 * 20, keys(*range(20)))
    assert names(placement)[0] == "p-1"
    assert [(s.holder.node, s.first_block, s.blocks) for s in placement.sources] == [("c-1", 0, 3)]


def test_decode_nodes_are_chosen_by_predicted_time_between_tokens_and_room() -> None:
    cluster = ClusterOf(1, 3)
    cluster.report("d-0", "decode", attempts=("a/0/0", "b/0/0"), batch_tokens=5000)
    cluster.report("d-1", "decode", kv_blocks_held=4095)
    assert names(cluster.place(100))[1] == "d-2"
    cluster.report("d-2", "decode", attempts=tuple(f"x{i}/0/0" for i in range(9)), batch_tokens=90_000)
    assert names(cluster.place(100))[1] == "d-0"


def test_assignments_count_until_the_node_reports_them() -> None:
    cluster = ClusterOf(2, 2)
    first = cluster.place(1000, attempt="a/0/0")
    second = cluster.place(1000, attempt="b/0/0")
    assert {names(first), names(second)} == {("p-0", "d-0"), ("p-1", "d-1")}
    third = cluster.place(1000, attempt="c/0/0")
    assert third.predicted.queue_s == pytest.approx(1.01)
    cluster.report("p-0", "prefill", attempts=("a/0/0", "c/0/0"), queue_s=3.0)
    cluster.report("p-1", "prefill", attempts=("b/0/0",), queue_s=0.5)
    fourth = cluster.place(1000, attempt="d/0/0")
    assert names(fourth)[0] == "p-1"
    assert fourth.predicted.queue_s == pytest.approx(0.5)


def test_an_assignment_that_nobody_uses_is_taken_back() -> None:
    cluster = ClusterOf(1, 1)
    before = cluster.place(100).predicted
    given_up = cluster.place(5000)
    assert cluster.place(100).predicted.queue_s > 4.0
    for _ in range(2):
        assert cluster.feed(GivenUp(given_up.attempt)) == []
    after = cluster.place(100).predicted
    assert after.queue_s < 1.0
    assert before.queue_s == 0.0
    assert cluster.feed(GivenUp("never/0/0")) == []


def test_a_second_attempt_takes_back_what_was_booked_for_the_first() -> None:
    """A decode node refused the first one, so nobody computes it: neither its time nor its blocks may count."""
    cluster = ClusterOf(1, 1, 1)
    first = cluster.place(20 * 16, HEAD[:20], attempt="a/0/0").predicted
    for number in (1, 2):
        again = cluster.place(20 * 16, HEAD[:20], attempt=f"a/0/{number}")
        assert again.cached_blocks == 0
        assert again.predicted.ttft_s == pytest.approx(first.ttft_s)
    other = cluster.place(20 * 16, HEAD[:20], attempt="b/0/1")
    assert other.predicted.queue_s > 0.0, "others' attempts stay booked"


def test_a_queue_drains_with_time() -> None:
    cluster = ClusterOf(1, 1)
    cluster.report("p-0", "prefill", queue_s=3.0)
    cluster.now += 1.0
    assert cluster.place(attempt="a/0/0").predicted.queue_s == pytest.approx(2.0)


# -- inlined prefill ---------------------------------------------------------------------------------------------------


def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    cluster = ClusterOf(1, 2, 1, inline_tokens=64)
    assert names(cluster.place(8)) == (None, "d-0")
    assert names(cluster.place(200)) == ("p-0", "d-1")


def test_so_is_a_prompt_that_the_decode_node_has_cached() -> None:
    cluster = ClusterOf(1, 2, 1, inline_tokens=64)
    cluster.stored("d-1", HEAD[:20])
    placement = cluster.place(21 * 16, HEAD[:21])
    assert names(placement) == (None, "d-1")
    assert placement.cached_blocks == 20
    assert "cached" in placement.reason


def test_inlined_prefill_keeps_the_batch_within_the_objective() -> None:
    cluster = ClusterOf(1, 1, inline_tokens=64, objectives=Objectives(tbt_s=0.08))
    cluster.report("p-0", "prefill", queue_s=9.0)
    cluster.report("d-0", "decode", attempts=("a/0/0",), batch_tokens=20)
    assert names(cluster.place(20)) == (None, "d-0")
    assert names(cluster.place(60)) == ("p-0", "d-0")


@pytest.mark.parametrize("policy", ["random", "load_balance", "cache_aware"])
def test_only_a_policy_that_weighs_it_lets_decode_nodes_prefill(policy: str) -> None:
    cluster = ClusterOf(1, 1, policy=policy, inline_tokens=64)
    assert {names(cluster.place(8, attempt=f"a{i}/0/0")) for i in range(9)} == {("p-0", "d-0")}


def test_prompts_that_decode_nodes_prefill_queue_up() -> None:
    cluster = ClusterOf(0, 1, inline_tokens=64)
    waits = [cluster.place(1000, attempt=f"a{i}/0/0").predicted.queue_s for i in range(20)]
    assert waits[0] == 0.0
    assert waits[-1] > 19 * 1.0


def test_a_policy_may_choose_the_decode_node() -> None:
    cluster = ClusterOf(1, 3, policy="joint")
    cluster.report("d-0", "decode", attempts=("a/0/0", "b/0/0"), batch_tokens=50_000)
    cluster.report("d-1", "decode", attempts=("c/0/0",), batch_tokens=50_000)
    assert names(cluster.place(1000)) == ("p-0", "d-2")


def test_without_prefill_nodes_decode_nodes_prefill() -> None:
    assert names(ClusterOf(0, 1).place(5000)) == (None, "d-0")


# -- bursts ------------------------------------------------------------------------------------------------------------


def test_prompts_that_share_new_blocks_wait_for_the_first_of_them() -> None:
    """Only the first computes the head. The others find it there when their turn comes, or pull it when it is ready."""
    cluster = ClusterOf(4, 4, 4)
    placements = [
        cluster.place(17 * 160, keys(*range(160), *range(1000 + 10 * i, 1010 + 10 * i)), attempt=f"a{i}/0/0")
        for i in range(4)
    ]
    assert [p.cached_blocks for p in placements] == [0, 160, 160, 160]
    for placement in placements[1:]:
        (source,) = placement.sources
        assert (source.first_block, source.blocks) == (0, 160)
        assert source.ready_in_s > 0.0
        assert placement.predicted.ttft_s < 1.25 * placements[0].predicted.ttft_s


def test_nobody_waits_without_patience_where_computing_is_sooner() -> None:
    cluster = ClusterOf(4, 4, 4, patience=1.0)
    for i in range(4):
        tail = keys(*range(1000 + 10 * i, 1010 + 10 * i))
        assert cluster.place(17 * 160, keys(*range(160)) + tail, attempt=f"a{i}/0/0").cached_blocks == 0


def test_nobody_waits_for_a_node_that_writes_to_no_cache_node() -> None:
    cluster = ClusterOf(4, 4)
    placements = [cluster.place(17 * 160, keys(*range(170)), attempt=f"a{i}/0/0") for i in range(4)]
    assert [p.cached_blocks for p in placements] == [0, 169, 169, 169]
    assert {names(p)[0] for p in placements} == {"p-0"}, "there it is in the node's own memory"


def test_recomputing_wins_where_waiting_takes_longer() -> None:
    cluster = ClusterOf(2, 2, 2)
    cluster.place(2000 * 16, keys(*range(1000, 3000)), attempt="long/0/0")
    first = cluster.place(18 * 16, HEAD[:18], attempt="a/0/0")
    cluster.report("p-1", "prefill", queue_s=9.0, attempts=("a/0/0",))
    cluster.report("p-0", "prefill", queue_s=0.0, attempts=("long/0/0",))
    again = cluster.place(18 * 16, HEAD[:18], attempt="b/0/0")
    assert (names(first)[0], names(again)[0], again.cached_blocks) == ("p-1", "p-0", 0)


# -- room --------------------------------------------------------------------------------------------------------------


def test_an_answer_goes_where_it_can_end() -> None:
    cluster = ClusterOf(1, 0)
    cluster.join("d-0", "decode", kv_blocks=16)
    cluster.join("d-1", "decode", kv_blocks=256)
    assert {names(cluster.place(100, max_new_tokens=1000, attempt=f"a{i}/0/0"))[1] for i in range(4)} == {
        "d-1"
    }
    assert names(cluster.place(100, max_new_tokens=8))[1] == "d-0"
    assert names(cluster.place(100, max_new_tokens=9000)) == ("p-0", "d-0"), (
        "nobody can hold it: it goes on moving"
    )


# -- refusing ----------------------------------------------------------------------------------------------------------


def test_nobody_there_is_unavailable_not_overloaded() -> None:
    assert ClusterOf(0, 0).refused().code == "unavailable"
    assert ClusterOf(1, 0).refused().code == "unavailable"
    assert ClusterOf(1, 1).refused(model="other").code == "unavailable"


def test_a_prompt_that_can_never_fit_is_refused_and_others_go_on() -> None:
    cluster = ClusterOf(1, 1)
    assert cluster.refused(4096 * BLOCK_TOKENS).code == "too_large"
    assert cluster.place(4095 * BLOCK_TOKENS).decode is not None


def test_full_queues_everywhere_are_overloaded_with_a_time_to_wait() -> None:
    cluster = ClusterOf(0, 1)
    cluster.join("p-0", "prefill", max_waiting=2)
    cluster.report("p-0", "prefill", waiting=2, queue_s=7.0, attempts=("a/0/0", "b/0/0"))
    error = cluster.refused()
    assert (error.code, error.retry_after_s) == ("overloaded", 7.0)
    assert names(cluster.place(retry=True)) == (None, "d-0")
    cluster.report("p-0", "prefill", waiting=1)
    assert names(cluster.place()) == ("p-0", "d-0")


def test_a_full_decode_node_is_passed_over() -> None:
    cluster = ClusterOf(1, 0)
    cluster.join("d-0", "decode", max_running=1, max_waiting=1)
    cluster.join("d-1", "decode", max_running=1, max_waiting=1)
    cluster.report("d-0", "decode", attempts=("a/0/0", "b/0/0"))
    assert [names(cluster.place())[1] for _ in range(2)] == ["d-1", "d-1"]
    assert cluster.refused().code == "overloaded"


def test_over_an_objective_is_refused_early() -> None:
    cluster = ClusterOf(1, 1, objectives=Objectives(ttft_s=1.0))
    cluster.report("p-0", "prefill", queue_s=5.0, attempts=("a/0/0",), cost_samples=50)
    error = cluster.refused(100)
    assert error.code == "overloaded"
    assert error.retry_after_s == pytest.approx(4.11)
    assert cluster.place(100, retry=True)


def test_a_wrong_prior_refuses_nobody_while_nodes_are_idle() -> None:
    cluster = ClusterOf(1, 1, objectives=Objectives(ttft_s=0.05))
    for i in range(20):
        cluster.now += 3.0
        cluster.report("p-0", "prefill")
        cluster.report("d-0", "decode")
        cluster.place(1000, attempt=f"a{i}/0/0")
    assert cluster.machine.let_through == 20


def test_an_idle_cluster_of_given_time_models_refuses_all_that_is_over() -> None:
    cluster = ClusterOf(1, 1, objectives=Objectives(ttft_s=0.05))
    for _ in range(20):
        cluster.now += 3.0
        cluster.report("p-0", "prefill", cost_given=True)
        cluster.report("d-0", "decode", cost_given=True)
        assert cluster.refused(1000).code == "overloaded"
    assert cluster.place(10)
    assert cluster.machine.let_through == 0


def test_one_fitted_time_model_among_given_ones_is_trusted_by_its_own_samples() -> None:
    cluster = ClusterOf(1, 1, objectives=Objectives(ttft_s=0.05, idle_refusals=1.0))
    cluster.report("p-0", "prefill", cost_given=True)
    cluster.report("d-0", "decode", cost_samples=50)
    assert cluster.refused(1000).code == "overloaded"
    cluster.report("d-0", "decode", cost_samples=0)
    assert cluster.place(1000)
