"""Penalties, bias and bans against a plain reference, row by row and whatever the neighbours want."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.kv.block_keys import pack_tokens
from shared.protocol.sampling import SamplingParams

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.sampling.bias import FORCE  # noqa: E402
from shared.engine.sampling.reshape import Row, fault, reshape  # noqa: E402

VOCAB = 60

ids = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.1, 2.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 0.1, 2.0]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -3.0, 0.5, 100.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 5),
    eos_token_ids=st.sampled_from([(), (3,), (3, 7)]),
)


@st.composite
def rows(draw: Any) -> Row:
    prompt, answer = draw(st.lists(ids, max_size=8)), draw(st.lists(ids, max_size=8))
    allowed = draw(st.none() | st.binary(min_size=8, max_size=12))
    return Row(draw(params), pack_tokens([*prompt, *answer]), len(answer), allowed, draw(st.booleans()))


def expected(logits: list[float], row: Row) -> list[float]:
    """One row, token by token."""
    p = row.params
    past = list(memoryview(row.past).cast("I"))
    answer = Counter(past[len(past) - row.answered :])
    result = []
    for id_, logit in enumerate(logits):
        if id_ in past:
            logit = logit / p.repetition_penalty if logit > 0 else logit * p.repetition_penalty
        if id_ in answer:
            logit -= answer[id_] * p.frequency_penalty + p.presence_penalty
        bias = dict(p.logit_bias).get(id_, 0.0)
        logit += {-100.0: -math.inf, 100.0: FORCE}.get(bias, bias)
        if row.allowed is not None and not (row.allowed[id_ // 8] >> (id_ % 8)) & 1:
            logit = -math.inf
        if id_ in p.eos_token_ids and row.answered < p.min_tokens and not row.complete:
            logit = -math.inf
        result.append(logit)
    return result


def logits(count: int, seed: int) -> Any:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)).double() * 3


@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6), st.integers(0, 99))
def test_every_row_is_what_a_plain_reference_makes_of_it(batch: list[Row], seed: int) -> None:
    before = logits(len(batch), seed)
    after = before.clone()
    reshape(after, batch)
    for row, was, became in zip(batch, before.tolist(), after.tolist(), strict=True):
        assert became == pytest.approx(expected(was, row), abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(st.lists(rows(), min_size=2, max_size=6), st.integers(0, 99))
def test_a_row_alone_becomes_bit_for_bit_what_it_becomes_in_a_batch(batch: list[Row], seed: int) -> None:
    together = logits(len(batch), seed)
    alone = [together[i : i + 1].clone() for i in range(len(batch))]
    reshape(together, batch)
    for i, row in enumerate(batch):
        reshape(alone[i], [row])
        assert torch.equal(alone[i][0], together[i])


def test_a_long_past_counts_every_token() -> None:
    past = [5] * 3000 + [6] * 1000
    row = Row(SamplingParams(frequency_penalty=0.001), pack_tokens(past), len(past))
    flat = torch.zeros(1, VOCAB, dtype=torch.float64)
    reshape(flat, [row])
    assert flat[0, 5:7].tolist() == [-3.0, -1.0]


def test_a_bias_outside_the_vocabulary_is_a_fault_of_its_row() -> None:
    assert "logit_bias" in fault(Row(SamplingParams(logit_bias=((VOCAB, 1.0),))), VOCAB)
    assert "logit_bias" in fault(Row(SamplingParams(logit_bias=((-1, 1.0),))), VOCAB)
    assert "past" in fault(Row(SamplingParams(), pack_tokens([VOCAB]), 1), VOCAB)
    assert not fault(Row(SamplingParams(logit_bias=((VOCAB - 1, 1.0),)), pack_tokens([0]), 1), VOCAB)
