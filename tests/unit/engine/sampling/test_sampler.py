"""The model engine's sampling of whole steps: what one asks for changes nothing for another, and fails it alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.kv.block_keys import pack_tokens
from shared.core.worker.steps import SequenceStep
from shared.protocol.sampling import Grammar, SamplingParams

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.sampling.sampler import Sampler  # noqa: E402
from shared.text.grammar import Follower, byte_tokenizer  # noqa: E402

VOCAB, END = 300, 256
WORD = Grammar("regex", "[a-z]+")
PAST = b"the past of an answer"


def sampler() -> Sampler:
    return Sampler(Follower(byte_tokenizer(VOCAB, (END,), END)))


def step(
    sample: SamplingParams,
    name: str = "a",
    past: Sequence[int] = (),
    answered: int | None = None,
    position: int = 9,
) -> SequenceStep:
    packed = pack_tokens(list(past))
    return SequenceStep(
        name, position - 1, 1, b"", (), sample, packed, len(past) if answered is None else answered
    )


def logits(rows: int, seed: int = 0) -> Any:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.sampled_from([None, 3]),
    eos_token_ids=st.just((END,)),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((97, 5.0), (98, -100.0)), ((VOCAB, 1.0),)]),
    min_tokens=st.sampled_from([0, 4]),
    grammar=st.sampled_from([None, WORD, Grammar("regex", "a(")]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(params, st.integers(0, 6)), min_size=2, max_size=6), st.integers(0, 50))
def test_a_sequence_alone_gets_what_it_gets_in_a_batch(
    batch: list[tuple[SamplingParams, int]], seed: int
) -> None:
    rows = logits(len(batch), seed)
    rows[0, 5] = math.nan
    steps = [step(p, f"a{i}", b"letters"[:length]) for i, (p, length) in enumerate(batch)]
    together = sampler().sample(rows, steps)
    alone = [sampler().sample(rows[i : i + 1], [one])[0] for i, one in enumerate(steps)]
    assert together == alone
    assert together[0].error


def test_who_can_not_be_sampled_fails_alone() -> None:
    good = SamplingParams(temperature=0.8, seed=4, top_logprobs=2)
    bad = [
        SamplingParams(logit_bias=((VOCAB, 1.0),)),
        SamplingParams(grammar=Grammar("regex", "a(")),
        SamplingParams(repetition_penalty=0.0),
        SamplingParams(grammar=Grammar("choice", '["a"]'), logit_bias=((97, -100.0),)),
    ]
    rows = logits(len(bad) + 2)
    steps = [step(good, "x"), *(step(p, f"b{i}", [1], 0) for i, p in enumerate(bad)), step(good, "y")]
    results = sampler().sample(rows, steps)
    assert [bool(r.error) for r in results] == [False, *[True] * len(bad), False]
    assert all(not r.tokens for r in results if r.error)
    neighbours = Sampler().sample(rows[[0, -1]], [steps[0], steps[-1]])
    assert [results[0], results[-1]] == neighbours


def test_without_a_tokenizer_a_grammar_fails_its_sequence() -> None:
    first, second = Sampler().sample(
        logits(2), [step(SamplingParams(grammar=WORD)), step(SamplingParams(temperature=0.0))]
    )
    assert "tokenizer" in first.error
    assert second.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_the_greatest_bias_forces_and_the_least_bans(temperature: float) -> None:
    for seed in range(30):
        row = logits(1, seed)
        best = int(row.argmax())
        forced = SamplingParams(temperature, seed=seed, logit_bias=((7, 100.0), (9, 100.0)))
        assert sampler().sample(row, [step(forced)])[0].tokens[0] in (7, 9)
        banned = SamplingParams(temperature, seed=seed, logit_bias=((best, -100.0),))
        assert sampler().sample(row, [step(banned)])[0].tokens[0] != best


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    row = logits(1)
    told = torch.log_softmax(row[0].double(), 0)
    sample = SamplingParams(0.0, top_logprobs=2, logit_bias=((7, 100.0),), repetition_penalty=2.0)
    (result,) = sampler().sample(row, [step(sample, past=[1, 2, 3])])
    assert result.tokens == (7,)
    assert result.logprobs[0].logprob == pytest.approx(float(told[7]), abs=1e-9)
    assert [id_ for id_, _ in result.logprobs[0].top] == told.topk(2).indices.tolist()


def test_no_end_before_min_tokens() -> None:
    row = logits(1)
    row[0, END] = 100.0
    sample = SamplingParams(0.0, eos_token_ids=(END,), min_tokens=3)
    for answered in range(5):
        (result,) = sampler().sample(row, [step(sample, past=[1] * 6, answered=answered)])
        assert (result.tokens == (END,)) == (answered >= 3)


def test_a_grammar_that_leaves_only_the_end_wins_over_min_tokens() -> None:
    sample = SamplingParams(1.0, eos_token_ids=(END,), min_tokens=9, grammar=Grammar("choice", '["ab"]'))
    assert sampler().sample(logits(1), [step(sample, past=b"a")])[0].tokens == (ord("b"),)
    assert sampler().sample(logits(1), [step(sample, past=b"ab")])[0].tokens == (END,)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p: float) -> None:
    row = logits(1)
    shares = torch.softmax(row[0].double() / 0.9, 0)
    kept = set((shares >= min_p * shares.max()).nonzero()[:, 0].tolist())
    drawn = {
        sampler().sample(row, [step(SamplingParams(0.9, seed=seed, min_p=min_p))])[0].tokens[0]
        for seed in range(300)
    }
    assert drawn <= kept
    assert len(kept) > 20 or drawn == kept


def test_an_answer_made_by_two_engines_is_one_engine_s() -> None:
    """A failover: the second engine knows nothing of the attempt but its tokens."""
    sample = SamplingParams(
        0.9, seed=3, frequency_penalty=0.4, repetition_penalty=1.2, eos_token_ids=(END,), grammar=WORD
    )

    def answer(*engines: Sampler) -> list[int]:
        said: list[int] = []
        for i in range(12):
            engine = engines[i * len(engines) // 12]
            one = step(sample, f"a{id(engine)}", [*PAST, *said], len(said), position=30 + i)
            said += engine.sample(logits(1, seed=i), [one])[0].tokens
        return said

    one = sampler()
    assert answer(one) == answer(sampler(), sampler()) == answer(*(sampler() for _ in range(12)))
