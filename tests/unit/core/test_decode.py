"""The decode machine, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from shared.core import worker as w
from shared.core.blocks import block_keys, pack_tokens
from shared.core.cost import SMALL_MODEL_CPU
from shared.core.steps import InterruptRun
from shared.core.transfers import (
    BlocksFetched,
    CloseLanding,
    CommitPoolWrite,
    FetchBlocks,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    LandingProgressed,
    OpenLanding,
    OpenPoolWrite,
    PoolWriteEnded,
    SendBlocks,
)
from shared.protocol.requests import Reserved
from shared.protocol.sampling import SamplingParams, TokenLogprob
from tests.support.workers import (
    BLOCK,
    CACHE,
    EOS,
    GATEWAY,
    NAMESPACE,
    Bench,
    decode_bench,
    keys_of,
    only,
    prompt_of,
    reserve,
    source,
)


def land(bench: Bench, attempt: str, prompt: list[int], *, first: int = 1, **fields: Any) -> list[Any]:
    """Reserve, and let the KV and first token arrive."""
    assert isinstance(bench.answer(reserve(attempt, prompt, **fields)), Reserved)
    return bench.do(LandingArrived(attempt, first))


# -- the way of a sequence ---------------------------------------------------------------------------------------------


def test_room_is_reserved_then_tokens_follow_the_landing() -> None:
    bench = decode_bench(headroom_tokens=4)
    prompt = prompt_of(9)
    commands = bench.submit(reserve("a", prompt, first_index=5, max_new_tokens=4))
    (opened,), (reply,) = only(commands, OpenLanding), only(commands, w.Reply)
    assert reply.message == Reserved("a", opened.landing, 3)
    assert len(opened.landing) == 16
    assert len(opened.pages) == 3
    assert bench.step is None
    bench.do(LandingArrived("a", 7, cached_tokens=4))
    assert bench.deltas == [], "the prefill node sent the first token"
    assert bench.step is not None
    (s,) = bench.step.sequences
    assert (s.start, s.tokens, s.token_ids) == (9, 1, pack_tokens([7]))
    assert s.pages[:3] == opened.pages
    for token in (11, 12, 13):
        bench.run(token)
    assert [(d.index, d.tokens) for d in bench.deltas] == [(6, (11,)), (7, (12,)), (8, (13,))]
    assert bench.finish("a") == "length"
    assert bench.machine.counters["prompt_tokens_computed"] == 0
    assert bench.machine.counters["tokens_generated"] == 3


@pytest.mark.parametrize("wanted", [2, 3, 4])
@pytest.mark.parametrize("local", [False, True])
def test_pitfall_3_10_as_many_tokens_as_wanted(wanted: int, local: bool) -> None:
    bench = decode_bench()
    if local:
        bench.submit(reserve("a", prompt_of(3), local=True, max_new_tokens=wanted, pool=None))
    else:
        land(bench, "a", prompt_of(3), max_new_tokens=wanted, pool=None)
    while bench.step is not None:
        bench.run()
    assert len(bench.said("a")) == (wanted if local else wanted - 1)
    assert bench.finish("a") == "length"
    bench.idle()


def test_pitfall_3_9_eos_ends_the_sequence_and_is_its_last_token() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(3), pool=None)
    bench.run(token=5)
    bench.run(token=EOS)
    assert (bench.said("a"), bench.finish("a")) == ([5, EOS], "stop")
    bench.idle()


def test_an_ignored_eos_ends_nothing() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(3), sampling=SamplingParams(eos_token_ids=(EOS,), ignore_eos=True))
    bench.run(token=EOS)
    assert bench.finish("a") is None


def test_a_landed_first_token_that_ends_the_answer_is_sent() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(3), first=EOS, pool=None)
    assert (bench.said("a"), bench.finish("a")) == ([EOS], "stop")
    bench.idle()


def test_pitfall_3_11_logprobs_of_the_first_token_are_kept() -> None:
    bench = decode_bench()
    bench.submit(reserve("a", prompt_of(3), first_index=2))
    bench.do(LandingArrived("a", 7, TokenLogprob(-0.5), 0))
    delta = bench.sync("a", 2).delta
    assert (delta.tokens, delta.logprobs) == ((7,), (TokenLogprob(-0.5),))


def test_pitfall_3_12_cached_tokens_are_prefills_and_below_the_prompt() -> None:
    bench = decode_bench()
    bench.submit(reserve("a", prompt_of(9)))
    bench.do(LandingArrived("a", 7, cached_tokens=8))
    assert bench.sync("a").delta.cached_tokens == 8
    bench.submit(reserve("b", prompt_of(9)))
    bench.do(LandingArrived("b", 7, cached_tokens=99))
    assert bench.sync("b").delta.cached_tokens == 8
    assert bench.machine.counters["cached_tokens"] == 0


def test_sequences_share_a_step_and_one_message_per_gateway() -> None:
    bench = decode_bench()
    land(bench, "x", prompt_of(3))
    for i in range(3):
        land(bench, f"a{i}", prompt_of(3 + i), gateway=GATEWAY if i < 2 else "gateway-1")
    bench.run()
    sends = only(bench.run(), w.SendTokens)
    assert {s.gateway: [d.attempt for d in s.deltas] for s in sends} == {
        GATEWAY: ["x", "a0", "a1"],
        "gateway-1": ["a2"],
    }


# -- local prefill -----------------------------------------------------------------------------------------------------


def test_local_prefill_computes_and_sends_the_first_token_itself() -> None:
    bench = decode_bench()
    commands = bench.submit(reserve("a", prompt_of(13), local=True, first_index=2))
    assert only(commands, OpenLanding) == []
    (reply,) = only(commands, w.Reply)
    assert reply.message.landing == b""
    assert bench.step is not None
    assert [(s.start, s.tokens) for s in bench.step.sequences] == [(0, 8)]
    bench.run()
    bench.run(token=6)
    (delta,) = bench.deltas
    assert (delta.index, delta.tokens, delta.cached_tokens) == (2, (6,), 0)
    assert bench.machine.counters["prompt_tokens_computed"] == 13


def test_pitfall_3_18_local_prefill_reuses_own_memory() -> None:
    bench = decode_bench()
    prompt = prompt_of(8)
    land(bench, "a", prompt, max_new_tokens=2, pool=None)
    bench.run()
    bench.submit(reserve("b", [*prompt, 1, 2], local=True))
    assert bench.step is not None
    assert [(s.start, s.tokens) for s in bench.step.sequences] == [(8, 2)]
    bench.run()
    assert bench.deltas[-1].cached_tokens == 8


def test_local_prefill_fetches_its_sources() -> None:
    bench = decode_bench()
    (fetch,) = only(
        bench.submit(reserve("a", prompt_of(13), local=True, sources=(source(0, 2),))), FetchBlocks
    )
    assert fetch.keys == keys_of(prompt_of(13))[:2]
    assert bench.step is None
    bench.do(BlocksFetched("a", 0, 2))
    bench.run(token=3)
    assert bench.deltas[-1].cached_tokens == 8


def test_decoding_goes_on_beside_a_long_local_prefill() -> None:
    bench = decode_bench()
    land(bench, "a", prompt_of(3))
    bench.submit(reserve("b", prompt_of(20), local=True))
    bench.run()
    assert bench.step is not None
    assert [(s.attempt, s.tokens) for s in bench.step.sequences] == [("a", 1), ("b", 4)]


# -- reserving ---------------------------------------------------------------------------------------------------------


def test_pitfall_3_6_room_before_prefill_or_overloaded() -> None:
    """A pool of 1.2 requests gets four: one has room, three are told when to come back."""
    bench = decode_bench(pages=6, headroom_tokens=4)
    answers = [bench.answer(reserve(f"a{i}", prompt_of(15))) for i in range(4)]
    assert isinstance(answers[0], Reserved)
    assert [a.code for a in answers[1:]] == ["overloaded"] * 3
    assert all(a.retry_after_s > 0 for a in answers[1:])
    assert bench.machine.load(bench.now).attempts == ("a0",)
    bench.do(LandingArrived("a0", 1))
    while bench.step is not None:
        bench.run()
    bench.do(PoolWriteEnded("a0", 4))
    assert bench.finish("a0") == "length"
    assert isinstance(bench.answer(reserve("a4", prompt_of(15))), Reserved)


def test_reserving_again_gives_the_same_landing() -> None:
    bench = decode_bench()
    first = bench.answer(reserve("a", prompt_of(9), budget_s=9.0))
    assert bench.answer(reserve("a", prompt_of(9), budget_s=8.0)) == first
    assert bench.machine.pool.held == first.blocks


def test_pitfall_3_8_landings_are_never_shared_and_a_different_request_is_refused() -> None:
    bench = decode_bench(pages=64)
    landings = {bench.answer(reserve(f"r/{choice}/0", prompt_of(9))).landing for choice in range(4)}
    assert len(landings) == 4
    error = bench.answer(reserve("r/0/0", prompt_of(10)))
    assert (error.code, error.param) == ("invalid", "attempt")
    assert len(bench.machine.load(bench.now).attempts) == 4
    bench.do(w.AttemptCancelled("r/0/0"))
    bench.do(LandingClosed("r/0/0"))
    assert bench.answer(reserve("r/0/0", prompt_of(9))).code == "unavailable"
    again = decode_bench(incarnation="life-1").answer(reserve("r/0/0", prompt_of(9))).landing
    assert again in landings, "minted from names alone"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"incarnation": "life-0"}, "unavailable"),
        ({"namespace": b"x" * 16}, "refused"),
        ({"block_keys": ()}, "invalid"),
        ({"tail_tokens": ()}, "invalid"),
        ({"max_new_tokens": 0}, "invalid"),
    ],
)
def test_what_can_not_be_served_is_refused(fields: dict[str, Any], code: str) -> None:
    bench = decode_bench()
    assert bench.answer(reserve("a", prompt_of(6), **fields)).code == code
    bench.idle()


def test_pitfall_4_6_what_can_never_fit_is_refused() -> None:
    bench = decode_bench(pages=4, headroom_tokens=4)
    assert bench.answer(reserve("a", prompt_of(13))).code == "too_large"
    assert isinstance(bench.answer(reserve("b", prompt_of(12), max_new_tokens=4)), Reserved)


def test_reservations_are_bounded_and_a_full_batch_lets_landed_ones_wait() -> None:
    bench = decode_bench(pages=64, max_running=2, max_waiting=1)
    for name in "abc":
        land(bench, name, prompt_of(3))
    assert bench.answer(reserve("d", prompt_of(3))).code == "overloaded"
    bench.run()
    assert bench.step is not None
    assert [s.attempt for s in bench.step.sequences] == ["a", "b"]
    bench.do(w.AttemptCancelled("a"))
    bench.run()
    bench.do(PoolWriteEnded("a"))
    assert [s.attempt for s in bench.step.sequences] == ["b", "c"]


def test_a_sequence_that_would_slow_all_down_is_given_up_when_it_lands() -> None:
    step = SMALL_MODEL_CPU.step_fixed_s + 1.5 * SMALL_MODEL_CPU.step_request_s
    bench = decode_bench(tbt_limit_s=step, fit_cost=False)
    land(bench, "a", prompt_of(3))
    land(bench, "b", prompt_of(8))
    assert (bench.finish("a"), bench.finish("b")) == (None, "moved")


# -- landings that go wrong --------------------------------------------------------------------------------------------


def test_pitfall_3_5_bad_kv_is_never_decoded_on() -> None:
    bench = decode_bench()
    bench.submit(reserve("a", prompt_of(9), first_index=4))
    assert bench.do(LandingFailed("a", "block 1 is corrupt"))
    assert bench.step is None
    (delta,) = bench.deltas
    assert (delta.tokens, delta.finish, delta.error) == ((), "moved", "block 1 is corrupt")
    bench.idle()
    assert bench.machine.pool.cached == 0


def test_pitfall_3_4_pages_are_nobodys_until_the_landing_is_closed() -> None:
    bench = decode_bench(pages=6)
    (opened,) = only(bench.submit(reserve("a", prompt_of(12))), OpenLanding)
    assert bench.do(w.AttemptCancelled("a")) == [CloseLanding("a", opened.landing)]
    assert bench.answer(reserve("b", prompt_of(12))).code == "overloaded"
    bench.do(LandingClosed("a"))
    (again,) = only(bench.submit(reserve("b", prompt_of(12))), OpenLanding)
    assert again.landing != opened.landing


@pytest.mark.parametrize("ending", [LandingArrived("a", 1), LandingFailed("a", "lost"), LandingClosed("a")])
def test_whatever_ends_a_cancelled_landing_frees_its_pages_once(ending: Any) -> None:
    bench = decode_bench()
    bench.submit(reserve("a", prompt_of(9)))
    bench.do(w.AttemptCancelled("a"))
    assert bench.machine.pool.held > 0
    assert bench.do(ending) == []
    bench.idle()
    assert bench.do(LandingClosed("a")) == []
    assert bench.machine.counters["late_ignored"] == 1
    assert bench.finish("a") is None


def test_pitfall_3_1_a_reservation_that_nobody_writes_to_lapses() -> None:
    bench = decode_bench(reservation_lease_s=30.0, gateway_lease_s=1e9)
    bench.submit(reserve("a", prompt_of(9)))
    bench.tick(20)
    bench.sync("a")
    bench.tick(20)
    assert bench.finish("a") is None, "being asked for renews it"
    commands = bench.tick(11)
    assert bench.finish("a") == "moved"
    assert only(commands, CloseLanding)
    bench.do(LandingClosed("a"))
    bench.idle()


def test_a_writer_that_began_must_keep_writing_one_that_did_not_has_the_gateways_budget() -> None:
    bench = decode_bench(reservation_lease_s=30.0, gateway_lease_s=1e9)
    for name in ("queued", "writing", "stuck"):
        bench.submit(reserve(name, prompt_of(9), budget_s=100.0))
    for _ in range(3):
        bench.tick(25)
        bench.do(LandingProgressed("writing"))
        if bench.now < 130:
            bench.do(LandingProgressed("stuck"))
    assert bench.machine.load(bench.now).attempts == ("queued", "writing")
    bench.tick(25)
    assert bench.machine.load(bench.now).attempts == ("writing",)


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


def test_pitfall_4_8_out_of_pages_the_youngest_gives_way_its_blocks_saved_first() -> None:
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


def test_a_lone_sequence_that_can_not_grow_fails() -> None:
    bench = decode_bench(pages=2, headroom_tokens=0)
    land(bench, "a", prompt_of(7), max_new_tokens=9)
    while bench.step is not None:
        bench.run()
    assert (bench.finish("a"), len(bench.said("a"))) == ("failed", 1)
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
    (publish,) = only(commands, w.PublishBlocks)
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


def test_pitfall_3_3_late_repeated_and_unknown_events_are_ignored_and_counted() -> None:
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


def test_pitfall_7_3_drain_finishes_then_hands_over() -> None:
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
