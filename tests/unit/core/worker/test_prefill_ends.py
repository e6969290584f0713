"""The prefill machine when things end, fail, come late or go away."""

from __future__ import annotations

from shared.core.kv.block_events import PublishBlocks, SnapshotWanted
from shared.core.machine import BusFound, BusLost
from shared.core.worker import events as w
from shared.core.worker.steps import StepDone, StepFailed
from shared.core.worker.transfers import (
    AbortStreams,
    BlocksFetched,
    CommitPoolWrite,
    HandoffEnded,
    PoolWriteEnded,
)
from shared.protocol.requests import Accepted
from tests.support.worlds.workers import (
    GATEWAY,
    end_transfers,
    job,
    only,
    prefill_bench,
    prefilled,
    prompt_of,
)

# -- engine failures ---------------------------------------------------------------------------------------------------


def test_one_bad_sequence_fails_alone() -> None:
    bench = prefill_bench(chunk_tokens=100, max_running=3)
    bench.submit(job("x", prompt_of(3)))
    for name in ("good", "bad"):
        bench.submit(job(name, prompt_of(6, len(name))))
    bench.run()
    bench.run(errors=("bad",))
    assert (bench.finish("bad"), bench.finish("good"), bench.said("good")) == ("failed", None, [1])
    assert bench.deltas[-1].error == "broken" or bench.deltas[-2].error == "broken"


def test_a_failed_step_is_retried_one_by_one_and_only_the_cause_fails() -> None:
    bench = prefill_bench(chunk_tokens=100)
    bench.submit(job("x", prompt_of(3)))
    for name in ("a", "bad", "c"):
        bench.submit(job(name, prompt_of(6, ord(name[0]))))
    bench.run()
    alone = []
    bench.fail_step()
    while bench.step is not None:
        names = [s.attempt for s in bench.step.sequences]
        alone.append(names)
        if names == ["bad"]:
            bench.fail_step()
        else:
            bench.run()
    assert alone == [["a"], ["bad"], ["c"]]
    assert (bench.finish("a"), bench.finish("bad"), bench.finish("c")) == (None, "failed", None)
    assert bench.said("a") == bench.said("c") == [1]


def test_a_lone_sequence_is_retried_once_after_a_failed_step() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(3)))
    bench.fail_step()
    assert bench.step is not None
    bench.run()
    assert bench.said("a") == [1]
    bench.submit(job("b", prompt_of(3, 1)))
    bench.fail_step()
    bench.fail_step()
    assert bench.finish("b") == "failed"
    assert bench.step is None


def test_a_step_without_results_fails_its_sequences() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(3)))
    assert bench.step is not None
    bench.do(StepDone(bench.step.step, ()))
    assert bench.finish("a") == "failed"


def test_what_a_void_step_streamed_is_not_published() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(9)))
    bench.submit(job("b", prompt_of(13, 1)))
    bench.run()
    bench.fail_step()  # of both
    commands = bench.do(w.AttemptCancelled("b"))
    assert only(commands, AbortStreams) == [AbortStreams("b", handoff=True, pool=True)]
    assert only(commands, CommitPoolWrite) == []


# -- late, lost and gone -----------------------------------------------------------------------------------------------


def test_late_repeated_and_unknown_events_are_ignored_and_counted() -> None:
    bench = prefill_bench()
    prefilled(bench, "a", prompt_of(5))
    events = [
        HandoffEnded("a", True), HandoffEnded("x", False), PoolWriteEnded("a"), PoolWriteEnded("x"),
        BlocksFetched("a", 0, 1), BlocksFetched("x", 0, 1), StepDone(1, ()), StepFailed(7, "?"),
        w.AttemptCancelled("x"),
    ]  # fmt: skip
    for event in events:
        assert bench.do(event) == []
    assert bench.machine.counters["late_ignored"] == len(events)
    bench.do(w.AttemptCancelled("a"))
    bench.idle()


def test_sync_tells_what_is_known() -> None:
    bench = prefill_bench(max_running=1)
    assert bench.sync("a").state == "unknown"
    bench.submit(job("a", prompt_of(5), first_index=3))
    bench.submit(job("b", prompt_of(5)))
    assert bench.sync("a").state == "running"
    assert bench.sync("b").state == "waiting"
    assert bench.sync("a").delta is None
    bench.run(token=7)
    state = bench.sync("a", 3)
    assert (state.state, state.delta.index, state.delta.tokens, state.delta.cached_tokens) == (
        "running",
        3,
        (7,),
        0,
    )
    assert bench.sync("a", 4).delta is None
    end_transfers(bench, "a")
    assert (bench.sync("a", 3).state, bench.sync("a", 3).delta.tokens) == ("finished", (7,))
    bench.tick(61)
    assert bench.sync("a", 3).state == "unknown"


def test_memory_of_ended_attempts_is_bounded() -> None:
    bench = prefill_bench(remember_attempts=2)
    for name in "abc":
        prefilled(bench, name, prompt_of(3))
    assert [bench.sync(name).state for name in "abc"] == ["unknown", "finished", "finished"]


def test_jobs_of_a_gateway_that_is_gone_are_cancelled() -> None:
    bench = prefill_bench(gateway_lease_s=10.0, max_running=1)
    for name in ("a", "b"):
        bench.submit(job(name, prompt_of(5)))
    bench.tick(9)
    bench.do(w.GatewaySeen(GATEWAY, "gateway-life-1"))
    bench.tick(9)
    assert bench.machine.load(bench.now).attempts == ("a", "b")
    bench.tick(2)
    assert bench.machine.load(bench.now).attempts == ()
    assert bench.machine.counters["orphaned"] == 2
    bench.run()
    end_transfers(bench, "a")
    bench.idle()


def test_leases_do_not_age_while_the_bus_is_lost() -> None:
    bench = prefill_bench(gateway_lease_s=10.0)
    bench.submit(job("a", prompt_of(5)))
    bench.do(BusLost())
    bench.tick(1000)
    bench.do(BusFound())
    bench.tick(9)
    assert bench.machine.load(bench.now).attempts == ("a",)
    bench.tick(2)
    assert bench.machine.load(bench.now).attempts == ()


def test_a_gateways_new_life_ends_what_the_old_one_owned() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(5)))
    bench.do(w.GatewaySeen(GATEWAY, "gateway-life-2"))
    assert bench.machine.load(bench.now).attempts == ()
    assert bench.answer(job("b", prompt_of(5))).code == "unavailable"
    assert bench.answer(job("c", prompt_of(5), gateway_incarnation="gateway-life-2")) == Accepted("c")
    bench.do(w.GatewaySeen(GATEWAY, "gateway-life-1"))
    assert bench.machine.load(bench.now).attempts == ("c",), "a late heartbeat of the old life means nothing"


def test_a_job_whose_budget_is_over_before_it_starts_fails() -> None:
    bench = prefill_bench(max_running=1)
    bench.submit(job("a", prompt_of(9)))
    bench.submit(job("b", prompt_of(9), budget_s=2.0))
    bench.tick(1)
    assert bench.finish("b") is None
    bench.tick(1)
    assert (bench.finish("b"), bench.deltas[-1].error) == ("failed", "deadline_exceeded")


# -- drain, index ------------------------------------------------------------------------------------------------------


def test_drain_finishes_what_runs_and_moves_what_waits() -> None:
    bench = prefill_bench(max_running=1)
    for name in ("a", "b"):
        bench.submit(job(name, prompt_of(5)))
    assert only(bench.do(w.DrainStarted(10.0)), w.Drained) == []
    assert bench.finish("b") == "moved"
    assert bench.answer(job("c", prompt_of(5))).code == "unavailable"
    assert bench.machine.load(bench.now).stage == "draining"
    bench.run()
    bench.do(PoolWriteEnded("a", 1))
    assert only(bench.do(HandoffEnded("a", True)), w.Drained) == [w.Drained()]
    assert only(bench.tick(1), w.Drained) == [], "said once"
    assert bench.finish("a") is None


def test_drain_moves_what_does_not_end_in_time() -> None:
    bench = prefill_bench()
    bench.submit(job("a", prompt_of(13)))
    bench.do(w.DrainStarted(5.0))
    assert only(bench.tick(6), w.Drained) == []
    assert bench.finish("a") == "moved"
    bench.run()
    assert only(end_transfers(bench, "a", ok=False), w.Drained) == [w.Drained()]


def test_an_idle_node_is_drained_at_once() -> None:
    assert prefill_bench().do(w.DrainStarted(5.0)) == [w.Drained()]


def test_block_events_are_numbered_and_a_snapshot_says_where_it_stands() -> None:
    bench = prefill_bench(chunk_tokens=100)
    stored: list[bytes] = []
    for i, name in enumerate("abc"):
        bench.submit(job(name, prompt_of(9, i)))
        events = only(bench.run(), PublishBlocks)
        assert [e.seq for e in events] == [i + 1]
        stored += events[0].stored
        end_transfers(bench, name)
    (snapshot,) = bench.do(SnapshotWanted())
    assert (snapshot.seq, set(snapshot.keys)) == (3, set(stored))
    assert bench.machine.load(bench.now).block_events_seq == 3


def test_blocks_are_published_only_once_they_are_computed() -> None:
    bench = prefill_bench(chunk_tokens=100)
    assert only(bench.submit(job("a", prompt_of(9))), PublishBlocks) == []
    assert len(only(bench.run(), PublishBlocks)) == 1


def test_queue_prediction_follows_the_work() -> None:
    bench = prefill_bench(max_running=1, fit_cost=False)
    seen = [bench.machine.load(bench.now).queue_s]
    for name in ("a", "b"):
        bench.submit(job(name, prompt_of(13, ord(name))))
        seen.append(bench.machine.load(bench.now).queue_s)
    assert seen[0] == 0 < seen[1] < seen[2]
    bench.run()
    assert bench.machine.load(bench.now).queue_s < seen[2]


def test_a_time_model_that_is_not_fitted_is_reported_as_given() -> None:
    load = prefill_bench(fit_cost=False).machine.load(0.0)
    assert (load.cost, load.cost_samples, load.cost_given) == (None, 0, True)


def test_the_time_model_learns_from_steps() -> None:
    bench = prefill_bench(pages=64)
    before = bench.machine.load(bench.now)
    assert before.cost_samples == 0
    assert not before.cost_given
    for i in range(6):
        prefilled(bench, f"a{i}", prompt_of(8 + i, i))
    load = bench.machine.load(bench.now)
    assert load.cost_samples > 4
    assert load.cost != before.cost
