"""The decode machine, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from shared.core.costs.presets import SMALL_MODEL_CPU
from shared.core.kv.block_keys import pack_tokens
from shared.core.worker import events as w
from shared.core.worker.transfers import (
    BlocksFetched,
    CloseLanding,
    FetchBlocks,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    LandingProgressed,
    OpenLanding,
    PoolWriteEnded,
)
from shared.protocol.requests import Reserved
from shared.protocol.sampling import SamplingParams, TokenLogprob
from tests.support.worlds.workers import (
    EOS,
    GATEWAY,
    decode_bench,
    keys_of,
    land,
    only,
    prompt_of,
    reserve,
    source,
)

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
def test_as_many_tokens_as_wanted(wanted: int, local: bool) -> None:
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


def test_eos_ends_the_sequence_and_is_its_last_token() -> None:
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


def test_logprobs_of_the_first_token_are_kept() -> None:
    bench = decode_bench()
    bench.submit(reserve("a", prompt_of(3), first_index=2))
    bench.do(LandingArrived("a", 7, TokenLogprob(-0.5), 0))
    delta = bench.sync("a", 2).delta
    assert (delta.tokens, delta.logprobs) == ((7,), (TokenLogprob(-0.5),))


def test_cached_tokens_are_prefills_and_below_the_prompt() -> None:
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


def test_local_prefill_reuses_own_memory() -> None:
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


def test_room_before_prefill_or_overloaded() -> None:
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


def test_landings_are_never_shared_and_a_different_request_is_refused() -> None:
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


def test_what_can_never_fit_is_refused() -> None:
    bench = decode_bench(pages=4, headroom_tokens=4)
    assert bench.answer(reserve("a", prompt_of(16))).code == "too_large"
    assert bench.answer(reserve("b", prompt_of(17), max_new_tokens=1)).code == "too_large"
    reserved = bench.answer(reserve("c", prompt_of(13)))
    assert isinstance(reserved, Reserved), "it moves when it outgrows this node"
    assert reserved.blocks == 4


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


LIMIT_S = SMALL_MODEL_CPU.step_fixed_s + 1.5 * SMALL_MODEL_CPU.step_request_s
"""Room for one sequence, not for two."""


def test_a_sequence_that_would_slow_all_down_is_refused_when_it_lands() -> None:
    bench = decode_bench(fit_cost=False)
    land(bench, "a", prompt_of(3), tbt_limit_s=LIMIT_S)
    assert [(d.attempt, d.index, d.tokens) for d in bench.deltas] == [("a", 1, ())], (
        "it is told that it is taken"
    )
    land(bench, "b", prompt_of(8), tbt_limit_s=LIMIT_S)
    assert (bench.finish("a"), bench.finish("b")) == (None, "refused")
    assert bench.deltas[-1].retry_after_s > 0.0
    state = bench.sync("b")
    assert (state.delta.finish, state.delta.retry_after_s) == ("refused", bench.deltas[-1].retry_after_s)
    land(bench, "c", prompt_of(8))
    assert bench.finish("c") is None, "who has no limit is taken"


def test_a_prompt_to_be_prefilled_here_is_refused_when_it_asks_for_a_place() -> None:
    bench = decode_bench(fit_cost=False)
    land(bench, "a", prompt_of(3))
    answer = bench.answer(reserve("b", prompt_of(8), local=True, tbt_limit_s=LIMIT_S))
    assert answer.code == "overloaded"
    assert answer.retry_after_s > 0.0
    assert isinstance(bench.answer(reserve("c", prompt_of(8), local=True)), Reserved)


# -- landings that go wrong --------------------------------------------------------------------------------------------


def test_bad_kv_is_never_decoded_on() -> None:
    bench = decode_bench()
    bench.submit(reserve("a", prompt_of(9), first_index=4))
    assert bench.do(LandingFailed("a", "block 1 is corrupt"))
    assert bench.step is None
    (delta,) = bench.deltas
    assert (delta.tokens, delta.finish, delta.error) == ((), "moved", "block 1 is corrupt")
    bench.idle()
    assert bench.machine.pool.cached == 0


def test_pages_are_nobodys_until_the_landing_is_closed() -> None:
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


def test_a_reservation_that_nobody_writes_to_lapses() -> None:
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
