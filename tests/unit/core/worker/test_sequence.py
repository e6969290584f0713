"""A sequence takes tokens up to its end; steps and keys follow from its counters."""

from __future__ import annotations

from typing import Any

from shared.core.kv.block_keys import block_keys, pack_tokens
from shared.core.kv.pool import BlockPool
from shared.core.worker.answers import Answer
from shared.core.worker.computing.inflight_step import InflightStep, sequence_step
from shared.core.worker.computing.prefix import expected_prefix, next_fetch, reusable
from shared.core.worker.decode_sequence import DecodeSequence, computed_keys, landing_id, same_request
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import SequenceResult, StepDone
from shared.protocol.requests import TokenDelta
from shared.protocol.sampling import SamplingParams, TokenLogprob
from tests.support.worlds.workers import BLOCK, EOS, NAMESPACE, SAMPLING, keys_of, prompt_of, reserve, source


def sequence(tokens: int = 6, **fields: Any) -> SequenceState:
    prompt = prompt_of(tokens)
    """`fields` that are no arguments are set."""
    made = SequenceState(
        attempt="a",
        gateway="g",
        prompt_tokens=tokens,
        max_new_tokens=fields.pop("max_new_tokens", 3),
        sampling=SAMPLING,
        keys=keys_of(prompt),
        tokens=pack_tokens(prompt),
        sources=fields.pop("sources", ()),
        answer=fields.pop("answer", None),
    )
    for name, value in fields.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_are_taken_up_to_the_most_wanted() -> None:
    s = sequence(answer=Answer(7, cached_tokens=4))
    assert s.take((1,), ()) == TokenDelta("a", 7, (1,), cached_tokens=4)
    assert s.take((2, 3, 4), ()) == TokenDelta("a", 8, (2, 3), finish="length")
    assert s.answer.tokens == [1, 2, 3]
    assert s.wanted == 9
    assert s.take((5,), ()) is None


def test_tokens_are_taken_up_to_an_eos_and_logprobs_with_them() -> None:
    logprobs = tuple(TokenLogprob(-float(i)) for i in range(3))
    delta = sequence(max_new_tokens=9).take((1, EOS, 2), logprobs)
    assert delta == TokenDelta("a", 0, (1, EOS), logprobs[:2], "stop")


def test_an_eos_as_the_last_wanted_token_is_a_stop() -> None:
    delta = sequence(max_new_tokens=1).take((EOS,), ())
    assert delta is not None
    assert delta.finish == "stop"
    ignoring = sequence(max_new_tokens=1, sampling=SamplingParams(eos_token_ids=(EOS,), ignore_eos=True))
    delta = ignoring.take((EOS,), ())
    assert delta is not None
    assert delta.finish == "length"


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_carries_the_next_ids_and_samples_at_the_end() -> None:
    s = sequence(pages=[4, 9])
    first = sequence_step(s, 4)
    assert (first.start, first.token_ids, first.pages, first.sample) == (0, s.tokens[:16], (4, 9), None)
    s.computed = 4
    assert sequence_step(s, 2).sample == SAMPLING
    s.computed = 6
    s.take((77,), ())
    decode = sequence_step(s, 1)
    assert (decode.start, decode.token_ids, decode.sample) == (6, pack_tokens([77]), SAMPLING)


def test_the_page_table_follows_the_pages() -> None:
    s = sequence(pages=[4])
    assert s.table() == (4,)
    s.pages.append(9)
    assert s.table() == (4, 9)
    assert s.table() is s.table()


def test_results_are_matched_by_attempt_and_a_missing_one_is_an_error() -> None:
    inflight: InflightStep[SequenceState] = InflightStep()
    a, b = sequence(attempt="a"), sequence(attempt="b")
    inflight.launch([(a, 1), (b, 1)])
    done = inflight.done(StepDone(1, (SequenceResult("b", (5,)),)))
    assert [(s.attempt, r.tokens, bool(r.error)) for s, _, r in done] == [
        ("a", (), True),
        ("b", (5,), False),
    ]
    assert inflight.out is None


# -- prefixes and keys -------------------------------------------------------------------------------------------------


def test_at_most_the_blocks_before_the_last_token_are_reusable() -> None:
    assert [reusable(sequence(n), BLOCK) for n in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_sources_are_asked_for_what_continues_the_run() -> None:
    s = sequence(21, sources=(source(2, 2), source(0, 1), source(1, 9)), pages=list(range(6)))
    fetch = next_fetch(s, NAMESPACE, BLOCK, 0.0)
    assert fetch is not None
    assert fetch.source == source(0, 1)
    s.computed = BLOCK
    fetch = next_fetch(s, NAMESPACE, BLOCK, 0.0)
    assert fetch is not None
    assert (fetch.source, fetch.pages) == (source(1, 4), (1, 2, 3, 4))
    assert next_fetch(s, NAMESPACE, BLOCK, 0.0) is None


def test_the_expected_prefix_joins_own_blocks_and_sources() -> None:
    pool = BlockPool(8)
    s = sequence(21, sources=(source(1, 2), source(4, 1)))
    assert expected_prefix(pool, s, BLOCK) == 0
    pages = pool.allocate(1)
    assert pages is not None
    pool.register(pages[0], s.keys[0], None)
    assert expected_prefix(pool, s, BLOCK) == 3 * BLOCK


def test_keys_of_the_answer_chain_on_from_the_prompt() -> None:
    prompt, answer = prompt_of(6), list(range(50, 60))
    s = DecodeSequence(reserve("a", prompt, max_new_tokens=20))
    s.take(tuple(answer), ())
    s.computed = s.wanted - 1
    assert computed_keys(s, NAMESPACE, BLOCK) == tuple(
        block_keys(NAMESPACE, pack_tokens(prompt + answer[:-1]), BLOCK)
    )
    s.computed = 5
    assert computed_keys(s, NAMESPACE, BLOCK) == keys_of(prompt)
    short = DecodeSequence(reserve("b", [1], max_new_tokens=20))
    short.take(tuple(answer), ())
    short.computed = short.wanted - 1
    assert computed_keys(short, NAMESPACE, BLOCK) == tuple(
        block_keys(NAMESPACE, pack_tokens([1, *answer[:-1]]), BLOCK)
    )


def test_a_redelivery_may_have_less_time_left_and_nothing_else() -> None:
    first = reserve("a", prompt_of(6), budget_s=5.0)
    assert same_request(first, reserve("a", prompt_of(6), budget_s=4.0))
    others = (
        reserve("a", prompt_of(6), max_new_tokens=11),
        reserve("a", prompt_of(6, 1)),
        reserve("a", prompt_of(6), local=True),
        reserve("a", prompt_of(6), first_index=1),
    )
    assert not any(same_request(first, other) for other in others)


def test_landing_ids_differ_by_life_attempt_and_count() -> None:
    ids = {landing_id(life, attempt, n) for life in ("1", "2") for attempt in ("a", "b") for n in (1, 2)}
    assert len(ids) == 8
    assert all(len(i) == 16 for i in ids)
