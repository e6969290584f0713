"""Draws of the model engine: right distribution, cut where told, and blind to their neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol.sampling import SamplingParams

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.sampling.draw_batch import Drawn, draw  # noqa: E402

VOCAB = 3000


def logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> Any:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.9, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 50, VOCAB, 10 * VOCAB]),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.sampled_from([None, 0, 3, 20]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params, min_size=1, max_size=8), st.integers(0, 50), st.integers(0, 8000))
def test_a_row_alone_draws_what_it_draws_in_a_batch(
    batch: list[SamplingParams], seed: int, position: int
) -> None:
    rows = logits(len(batch), seed)
    together = draw(rows, batch, [position + i for i in range(len(batch))])
    alone = [draw(rows[i : i + 1], [p], [position + i])[0] for i, p in enumerate(batch)]
    assert together == alone


def test_nan_rows_fail_alone_and_neighbours_stay_bit_equal() -> None:
    sampling = [SamplingParams(temperature=0.8, seed=i, top_logprobs=5) for i in range(6)]
    clean = draw(logits(6), sampling, range(6))
    spoilt = logits(6)
    spoilt[1, 7] = math.nan
    spoilt[3, :] = -math.inf
    spoilt[4, 9] = math.inf
    drawn = draw(spoilt, sampling, range(6))
    assert [bool(d.error) for d in drawn] == [False, True, False, True, True, False]
    assert [drawn[i] for i in (0, 2, 5)] == [clean[i] for i in (0, 2, 5)]
    assert all(drawn[i].token == -1 for i in (1, 3, 4))


def test_known_draws() -> None:
    """Frozen: a change would change every seeded answer between versions."""
    sampling = [SamplingParams(temperature=t, top_p=p, top_k=k, seed=42) for t, p, k in CASES]
    flat = torch.linspace(0, 1, 100).repeat(len(CASES), 1)
    assert [d.token for d in draw(flat, sampling, range(5, 10))] == DRAWN


CASES = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.5, 0.9, 0), (1.0, 1.0, 10), (2.0, 0.5, 50)]
DRAWN = [99, 55, 97, 90, 98]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 8, 1.0), (1.0, 0, 0.8)]
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over fixed seeds and positions, so the outcome is the same in every run."""
    row = logits(1, seed=3, vocab=16, scale=1.5)
    expected = torch.softmax(row[0].double() / temperature, 0)
    order = expected.argsort(descending=True)
    keep = order[: top_k or 16]
    shares = expected[keep] / expected[keep].sum()
    keep = keep[: int((shares.cumsum(0) < top_p).sum()) + 1] if top_p < 1 else keep
    probability = {int(i): float(expected[i] / expected[keep].sum()) for i in keep}
    count = 6000
    sampling = [SamplingParams(temperature, top_p, top_k, seed) for seed in range(count)]
    tokens = [d.token for d in draw(row.expand(count, -1), sampling, [i % 97 for i in range(count)])]
    assert set(tokens) == set(probability)
    chi_square = sum((tokens.count(i) - count * p) ** 2 / (count * p) for i, p in probability.items())
    freedom = len(probability) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_greedy_is_argmax_whatever_the_rest_says() -> None:
    rows = logits(4)
    drawn = draw(rows, [SamplingParams(0.0, 0.1, 3, seed) for seed in range(4)], range(4))
    assert [d.token for d in drawn] == rows.argmax(1).tolist()
    cold = draw(rows, [SamplingParams(1e-12, seed=seed) for seed in range(4)], range(4))
    assert [d.token for d in cold] == rows.argmax(1).tolist()


def test_a_flat_row_needs_the_whole_vocabulary_for_its_nucleus() -> None:
    flat = torch.zeros(1, VOCAB)
    flat[0, 5] = 0.1
    drawn = {draw(flat, [SamplingParams(top_p=0.999, seed=s)], [0])[0].token for s in range(200)}
    assert len(drawn) > 150


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    rows = logits(2)
    expected = torch.log_softmax(rows.double(), 1)
    sampling = [SamplingParams(0.5, 0.5, 4, seed=1, top_logprobs=5), SamplingParams(0.0, top_logprobs=0)]
    for row, drawn in enumerate(draw(rows, sampling, [0, 0])):
        assert drawn.logprob is not None
        assert drawn.logprob.logprob == pytest.approx(float(expected[row, drawn.token]), abs=1e-9)
        assert [i for i, _ in drawn.logprob.top] == expected[row].topk(5 - 5 * row).indices.tolist()


def test_wild_parameters_are_clamped() -> None:
    wild = SamplingParams(
        temperature=1.0, top_p=-3.0, top_k=9_999_999, seed=2**64 - 1, top_logprobs=2_000_000_000
    )
    (drawn,) = draw(logits(1), [wild], [2**40])
    assert drawn.token == int(logits(1).argmax())
    assert drawn.logprob is not None
    assert len(drawn.logprob.top) == 20


def test_masked_tokens_are_never_drawn_or_told() -> None:
    row = torch.full((1, 100), -math.inf)
    row[0, 40:43] = torch.tensor([0.0, 1.0, 0.5])
    drawn: list[Drawn] = []
    for seed in range(50):
        drawn += draw(row, [SamplingParams(top_p=0.999, seed=seed, top_logprobs=20)], [0])
    assert {d.token for d in drawn} == {40, 41, 42}
    assert all(d.logprob is not None and len(d.logprob.top) == 3 for d in drawn)
