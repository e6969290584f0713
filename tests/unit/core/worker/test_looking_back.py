"""Sampling that looks back sees the same past wherever a token is made: at prefill, at decode, after a failover."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.kv.block_keys import pack_tokens
from shared.core.request.attempt import Attempt, reserve_request
from shared.core.worker import events as w
from shared.core.worker.answers import Answer
from shared.core.worker.computing.inflight_step import sequence_step
from shared.core.worker.decode_sequence import DecodeSequence
from shared.core.worker.sequence import SequenceState
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import Placement, Reserved
from shared.protocol.sampling import Grammar, SamplingParams
from tests.support.worlds.request_world import choice_spec
from tests.support.worlds.workers import decode_bench, keys_of, land, only, prompt_of, reserve

GRAMMAR = SamplingParams(grammar=Grammar("regex", "a+"))
REPETITION = SamplingParams(repetition_penalty=1.1)
BLIND = SamplingParams(temperature=0.5, min_p=0.1, logit_bias=((5, 1.0),), top_logprobs=3)
LOOKING = [
    GRAMMAR,
    REPETITION,
    SamplingParams(presence_penalty=0.1),
    SamplingParams(frequency_penalty=-0.1),
    SamplingParams(min_tokens=1),
]


def past_of(
    prompt: list[int], said: list[int], first_index: int, sampling: SamplingParams
) -> tuple[list[int], int]:
    """What the step that makes the next token is told, by an attempt that began with token `first_index`."""
    known, own = prompt + said[:first_index], said[first_index:]
    sequence = SequenceState(
        attempt="a",
        gateway="g",
        prompt_tokens=len(known),
        max_new_tokens=100,
        sampling=sampling,
        keys=keys_of(known),
        tokens=pack_tokens(known),
        answer=Answer(first_index, list(own)),
    )
    sequence.wanted = len(known) + len(own)
    sequence.computed = sequence.wanted - 1
    step = sequence_step(sequence, 1)
    return list(memoryview(step.past).cast("I")), step.answered


@given(
    st.lists(st.integers(0, 89), min_size=1, max_size=9),
    st.lists(st.integers(0, 89), max_size=9),
    st.integers(0, 9),
    st.sampled_from(LOOKING),
)
def test_the_past_is_the_same_whichever_attempt_goes_on(
    prompt: list[int], said: list[int], first_index: int, sampling: SamplingParams
) -> None:
    first_index = min(first_index, len(said))
    expected = (prompt if sampling is REPETITION else []) + said
    assert past_of(prompt, said, first_index, sampling) == (expected, len(said))


def test_who_does_not_look_back_is_told_nothing() -> None:
    assert not BLIND.looks_back
    assert past_of([1, 2], [3], 0, BLIND) == ([], 0)


def test_chunks_that_do_not_sample_are_told_nothing() -> None:
    s = DecodeSequence(reserve("a", prompt_of(9), sampling=REPETITION, local=True))
    assert sequence_step(s, 4).past == b""
    s.computed = 4
    assert sequence_step(s, 5).past == pack_tokens(prompt_of(9))


def reserved(sampling: SamplingParams, said: list[int], *, local: bool = False) -> Any:
    spec = msgspec.structs.replace(choice_spec(), sampling=sampling)
    attempt = Attempt("r/0/1", len(said))
    prefill, decode = NodeRef("p", "1"), NodeRef("d", "1")
    attempt.placement = Placement("r/0/1", None if local else prefill, decode)
    attempt.use(attempt.placement.prefill, decode)
    return reserve_request(spec, attempt, said, 1.0, 0)


def test_a_reservation_carries_ids_only_where_draws_need_them() -> None:
    prompt = list(range(1, 11))
    assert reserved(BLIND, [5]).tokens == b""
    assert reserved(GRAMMAR, []).tokens == b""
    assert reserved(GRAMMAR, [5]).tokens == pack_tokens([*prompt, 5])
    assert reserved(REPETITION, []).tokens == pack_tokens(prompt)
    assert reserved(REPETITION, [5], local=True).tokens == b""


@pytest.mark.parametrize("sampling", [GRAMMAR, REPETITION])
def test_a_decode_node_looks_back_beyond_its_own_tokens(sampling: SamplingParams) -> None:
    prompt, said = prompt_of(7), [50, 51]
    bench = decode_bench()
    tokens = pack_tokens(prompt + said)
    land(bench, "a", prompt + said, first=52, sampling=sampling, first_index=2, tokens=tokens)
    assert bench.step is not None
    (step,) = bench.step.sequences
    expected = [50, 51, 52] if sampling is GRAMMAR else [*prompt, 50, 51, 52]
    assert (list(memoryview(step.past).cast("I")), step.answered) == (expected, 3)


def test_a_reservation_without_the_ids_it_needs_is_refused() -> None:
    bench = decode_bench()
    for fields in ({"sampling": REPETITION}, {"sampling": GRAMMAR, "first_index": 1}, {"tokens": b"1234"}):
        (reply,) = only(bench.submit(reserve("a", prompt_of(9), **fields)), w.Reply)
        assert isinstance(reply.message, WireError)
        assert reply.message.param == "tokens"
    (reply,) = only(bench.submit(reserve("a", prompt_of(9), sampling=GRAMMAR)), w.Reply)
    assert isinstance(reply.message, Reserved)
