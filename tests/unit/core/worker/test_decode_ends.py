"""The decode machine while answers grow, end, fail and are given up."""

from __future__ import annotations

from typing import Any

from shared.core.kv.block_events import PublishBlocks
from shared.core.kv.block_keys import block_keys, pack_tokens
from shared.core.worker import events as w
from shared.core.worker.steps import InterruptRun
from shared.core.worker.transfers import (
    BlocksFetched,
    CloseLanding,
    CommitPoolWrite,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    OpenPoolWrite,
    PoolWriteEnded,
    SendBlocks,
)
from shared.protocol.requests import Reserved
from tests.support.worlds.workers import (
    BLOCK,
    CACHE,
    EOS,
    NAMESPACE,
    decode_bench,
    keys_of,
    land,
    only,
    prompt_of,
    reserve,
)

# -- pages while decoding ----------------------------------------------------------------------------------------------


def test_pages_are_taken_as_the_answer_grows() -> None:
    bench = decode_bench(headroom_tokens=1)
    land(bench, "a", prompt_of(4), max_new_tokens=10, pool=None)
    held = []
    while bench.step is not None:
        held.append(bench.machine.pool.held)
        bench.run()
    assert held == [2, 2, 2, 2, 3, 3, 3, 3, 4]
    bench.idle()


def test_out_of_pages_the_youngest_gives_way_its_blocks_saved_first() -> None:
    bench = decode_bench(pages=5, headroom_tokens=0)
    land(bench, "old", prompt_of(7), max_new_tokens=12)
    land(bench, "young", prompt_of(7, 1), max_new_tokens=12)
    seen: list[Any] = []
    while bench.finish("young") is None and not only(seen, OpenPoolWrite):
        seen += bench.run(token=5)
    (write,) = only(seen, OpenPoolWrite)
    assert write.attempt == "young"
    assert len(write.keys) == len(write.pages) == 2
    assert bench.finish("young") is None, "told once its blocks are in the pool"
    assert bench.sync("young").state == "running"
    bench.do(PoolWriteEnded("young", 2))
    assert bench.finish("young") == "moved"
    while bench.step is not None:
        bench.run(token=5)
    assert (bench.finish("old"), len(bench.said("old"))) == ("length", 11)


def test_a_lone_sequence_that_can_not_grow_moves() -> None:
    bench = decode_bench(pages=2, headroom_tokens=0)
    land(bench, "a", prompt_of(7), max_new_tokens=9)
    while bench.step is not None:
        bench.run()
    bench.do(PoolWriteEnded("a", 2))
    assert (bench.finish("a"), len(bench.said("a"))) == ("moved", 1)
    assert "memory" in bench.deltas[-1].error
    bench.idle()


def test_a_page_is_left_for_each_that_runs() -> None:
    bench = decode_bench(pages=4, headroom_tokens=0)
    land(bench, "a", prompt_of(7))
    assert bench.answer(reserve("b", prompt_of(5))).code == "overloaded"
    assert isinstance(bench.answer(reserve("c", prompt_of(4))), Reserved)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_at_the_end_full_blocks_go_to_the_pool_and_stay_findable() -> None:
    bench = decode_bench()
    prompt = prompt_of(6)
    land(bench, "a", prompt, first=50, max_new_tokens=7)
    commands: list[Any] = []
    for token in range(51, 57):
        commands = bench.run(token)
    text = [*prompt, *range(50, 57)]
    keys = tuple(block_keys(NAMESPACE, pack_tokens(text[:-1]), BLOCK))
    assert len(keys) == 3, "the last token's KV was never computed"
    (write,) = only(commands, OpenPoolWrite)
    assert (write.pool, write.first_block, write.keys) == (CACHE, 0, keys)
    assert only(commands, SendBlocks) == [SendBlocks("a", 0, 3, to_handoff=False)]
    assert only(commands, CommitPoolWrite) == [CommitPoolWrite("a")]
    (publish,) = only(commands, PublishBlocks)
    assert publish.stored == keys[1:]
    assert bench.machine.pool.held == 3
    bench.do(PoolWriteEnded("a", 3))
    bench.idle()
    assert bench.machine.pool.peek(keys) == 3


def test_an_answer_without_a_new_full_block_writes_nothing() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(4), max_new_tokens=2)
    assert only(bench.run(), OpenPoolWrite) == []
    bench.idle()


def test_a_cancel_frees_a_running_sequence_after_the_step() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(8))
    land(bench, "b", prompt_of(3))
    bench.run()
    bench.do(w.AttemptCancelled("a"))
    held = bench.machine.pool.held
    bench.run()
    assert bench.machine.pool.held < held
    assert len(bench.said("a")) == 1, "tokens of the step it was cancelled in are dropped"
    assert bench.step is not None
    assert [s.attempt for s in bench.step.sequences] == ["b"]


def test_one_failed_sequence_saves_nothing_and_harms_nobody() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(3))
    land(bench, "bad", prompt_of(3, 1))
    bench.run()
    commands = bench.run(errors=("bad",))
    assert (bench.finish("bad"), bench.finish("a")) == ("failed", None)
    assert only(commands, OpenPoolWrite) == []
    assert bench.step is not None


def test_a_failed_step_is_tried_again_one_by_one() -> None:
    bench = decode_bench()
    for name in ("a", "bad"):
        land(bench, name, prompt_of(3), pool=None)
    bench.run(token=4)
    bench.fail_step()
    alone = []
    while bench.finish("bad") is None:
        assert bench.step is not None
        names = [s.attempt for s in bench.step.sequences]
        alone.append(names)
        if names == ["bad"]:
            bench.fail_step()
        else:
            bench.run(token=5)
    assert alone == [["a"], ["bad"]]
    assert bench.said("a") == [4, 5]


def test_sync_answers_all_tokens_from_an_index_on() -> None:
    bench = decode_bench()
    assert bench.sync("a").state == "unknown"
    bench.submit(reserve("a", prompt_of(3), first_index=10, max_new_tokens=4, pool=None))
    assert (bench.sync("a").state, bench.sync("a").delta) == ("waiting", None)
    bench.do(LandingArrived("a", 1))
    for token in (2, 3):
        bench.run(token)
    delta = bench.sync("a", 11).delta
    assert (delta.index, delta.tokens, delta.finish) == (11, (2, 3), None)
    bench.run(4)
    state = bench.sync("a", 10)
    assert (state.state, state.delta.tokens, state.delta.finish) == ("finished", (1, 2, 3, 4), "length")
    delta = bench.sync("a", 14).delta
    assert (delta.index, delta.tokens, delta.finish) == (14, (), "length")
    bench.tick(61)
    assert bench.sync("a", 10).state == "unknown"


def test_late_repeated_and_unknown_events_are_ignored_and_counted() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(3), max_new_tokens=2, pool=None)
    bench.run()
    events = [
        LandingArrived("a", 1), LandingArrived("x", 1), LandingFailed("a", "?"), LandingClosed("x"),
        PoolWriteEnded("a"), BlocksFetched("x", 0, 1), w.AttemptCancelled("x"),
    ]  # fmt: skip
    for event in events:
        assert bench.do(event) == []
    assert bench.machine.counters["late_ignored"] == len(events)
    bench.idle()


def test_gateways_lease() -> None:
    bench = decode_bench(gateway_lease_s=10.0)
    land(bench, "a", prompt_of(3), pool=None)
    bench.submit(reserve("b", prompt_of(3)))
    bench.tick(11)
    bench.run()
    bench.do(LandingClosed("b"))
    bench.idle()
    assert bench.machine.counters["orphaned"] == 2


# -- drain -------------------------------------------------------------------------------------------------------------


def test_drain_finishes_then_hands_over() -> None:
    bench = decode_bench(pages=64)
    land(bench, "short", prompt_of(8), max_new_tokens=3, pool=None)
    land(bench, "long", prompt_of(8), max_new_tokens=100)
    bench.submit(reserve("landing", prompt_of(3)))
    bench.do(w.DrainStarted(5.0))
    assert bench.answer(reserve("late", prompt_of(3))).code == "unavailable"
    for _ in range(5):
        bench.run()
    assert bench.finish("short") == "length"
    commands = bench.tick(6)
    assert only(commands, CloseLanding)
    assert bench.finish("landing") == "moved"
    assert bench.finish("long") is None, "its step is still out"
    commands = bench.run()
    (write,) = only(commands, OpenPoolWrite)
    assert write.attempt == "long"
    assert only(bench.do(PoolWriteEnded("long", 2)), w.Drained) == []
    assert bench.finish("long") == "moved"
    assert only(bench.do(LandingClosed("landing")), w.Drained) == [w.Drained()]
    bench.idle()


# -- repeated steps (the simulator's way of skipping ahead) ------------------------------------------------------------


def test_steps_repeat_until_something_must_change() -> None:
    bench = decode_bench(max_repeat=1000, headroom_tokens=100, pages=64)
    land(bench, "a", prompt_of(3), max_new_tokens=50)
    assert bench.step is not None
    assert bench.step.up_to == 49
    commands = land(bench, "b", prompt_of(3), max_new_tokens=9)
    assert commands == [InterruptRun(bench.step.step)]
    bench.run(token=1, repeats=10)
    assert bench.said("a") == [1] * 10
    assert (bench.step.up_to, len(bench.step.sequences)) == (8, 2)
    bench.run(token=1, repeats=8)
    assert bench.finish("b") == "length"
    assert bench.step.up_to == 31


def test_repeats_stop_where_the_pages_end_and_beside_a_prompt() -> None:
    bench = decode_bench(max_repeat=1000, headroom_tokens=2)
    land(bench, "a", prompt_of(3), max_new_tokens=50)
    assert bench.step is not None
    assert bench.step.up_to == 5
    commands = bench.submit(reserve("b", prompt_of(9), local=True))
    assert only(commands, InterruptRun)
    bench.run(repeats=5)
    assert bench.step.up_to == 1


def test_a_repeating_step_is_interrupted_when_somebody_leaves_but_not_for_nobody() -> None:
    bench = decode_bench(max_repeat=1000, max_running=1)
    land(bench, "a", prompt_of(3), max_new_tokens=20)
    assert only(land(bench, "b", prompt_of(3)), InterruptRun) == [], "the batch is full"
    assert only(bench.do(w.AttemptCancelled("b")), InterruptRun) == []
    assert len(only(bench.do(w.AttemptCancelled("a")), InterruptRun)) == 1


def test_an_eos_within_repeats_cuts_them() -> None:
    bench = decode_bench(max_repeat=1000)
    land(bench, "a", prompt_of(3), pool=None)
    bench.run(token=EOS, repeats=5)
    assert (bench.said("a"), bench.finish("a")) == ([EOS], "stop")
    bench.idle()


def test_without_token_ids_only_the_prompts_blocks_are_kept() -> None:
    bench = decode_bench(token_ids=False)
    request = reserve("a", prompt_of(6), tail_tokens=(), max_new_tokens=9)
    bench.submit(request)
    bench.do(LandingArrived("a", 0))
    commands: list[Any] = []
    while bench.step is not None:
        commands = bench.run(0)
    assert only(commands, OpenPoolWrite) == []
    assert bench.machine.pool.keys() == keys_of(prompt_of(6))


def test_load_counts_every_accepted_sequence() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(5))
    bench.submit(reserve("b", prompt_of(3)))
    bench.run()
    load = bench.machine.load(bench.now, seq=4)
    assert (load.seq, load.running, load.waiting, load.attempts) == (4, 1, 1, ("a", "b"))
    assert load.batch_tokens == 5 + 2 + 3
