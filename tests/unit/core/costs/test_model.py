from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.costs.model import (
    CostFit,
    compute_s,
    load_features,
    load_s,
    mixed_s,
    prefill_features,
    prefill_s,
    repeat_s,
    step_features,
    step_s,
    steps_within,
    transfer_s,
)
from shared.core.costs.presets import LLAMA2_70B_8XA800, PRESETS, SMALL_MODEL_CPU

# FAST'25 Fig 14: prefill seconds at 0 % and 95 % cached.
FIG_14 = {
    8: (1.002, 0.135),
    16: (2.056, 0.226),
    32: (4.479, 0.406),
    64: (10.587, 0.881),
    128: (27.514, 2.329),
}


@pytest.mark.parametrize("k", FIG_14)
def test_the_papers_node_reproduces_fig_14(k: int) -> None:
    cold, cached = FIG_14[k]
    n = k * 1024
    assert prefill_s(LLAMA2_70B_8XA800, n) == pytest.approx(cold, rel=0.05)
    assert prefill_s(LLAMA2_70B_8XA800, n, int(0.95 * n)) == pytest.approx(cached, rel=0.05)


def test_chunks_of_a_prompt_cost_the_prompt_plus_one_fixed_part_each() -> None:
    cost = LLAMA2_70B_8XA800
    chunks = [(0, 4096), (4096, 4096), (8192, 1000)]
    whole = compute_s(cost, 0, 9192)
    assert sum(compute_s(cost, s, n) for s, n in chunks) == pytest.approx(whole + 2 * cost.prefill_fixed_s)
    assert mixed_s(cost, chunks) == pytest.approx(whole)
    assert mixed_s(cost, (), 3, 300) == pytest.approx(step_s(cost, 3, 300) - 26.3e-3 + 67.9e-3)
    assert prefill_s(cost, 9192, 4096) == pytest.approx(compute_s(cost, 4096, 5096) + load_s(cost, 4096))


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 64), st.integers(0, 10**6), st.integers(0, 3000))
def test_repeated_steps_are_the_sum_of_single_ones(preset: str, b: int, kv: int, steps: int) -> None:
    cost = PRESETS[preset]
    total = 0.0
    for i in range(steps):
        total += step_s(cost, b, kv + i * b)
    assert repeat_s(cost, b, kv, steps) == pytest.approx(total)


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 64), st.integers(0, 10**6), st.floats(0, 500))
def test_steps_within_inverts_repeat(preset: str, b: int, kv: int, seconds: float) -> None:
    cost = PRESETS[preset]
    steps = steps_within(cost, b, kv, seconds)
    assert repeat_s(cost, b, kv, steps) <= seconds < repeat_s(cost, b, kv, steps + 1)


def test_transfer_takes_no_time_when_there_is_nothing_to_move() -> None:
    assert transfer_s(0, 1e9, 0.001) == 0.0
    assert transfer_s(2e9, 1e9, 0.001) == pytest.approx(2.001)


def test_fit_keeps_its_prior_until_it_has_seen_enough() -> None:
    fit = CostFit(SMALL_MODEL_CPU)
    for _ in range(3):
        fit.observe("prefill", prefill_features([(0, 100)]), 5.0)
    assert fit.coefficients == SMALL_MODEL_CPU
    assert fit.samples("prefill") == 3


@pytest.mark.parametrize("factor", [0.1, 10.0, 1000.0])
def test_a_prior_off_by_a_large_factor_recovers(factor: float) -> None:
    fit = CostFit(SMALL_MODEL_CPU)
    for n in (50, 400, 120, 800, 30, 333):
        fit.observe("prefill", prefill_features([(0, n)]), factor * compute_s(SMALL_MODEL_CPU, 0, n))
    expected = factor * compute_s(SMALL_MODEL_CPU, 0, 500)
    assert compute_s(fit.coefficients, 0, 500) == pytest.approx(expected, rel=0.05)


def test_a_node_that_becomes_ten_times_slower_is_noticed() -> None:
    fit = CostFit(SMALL_MODEL_CPU)
    for i in range(500):
        b = 1 + i % 8
        fit.observe("step", step_features(b, 500 * b), step_s(SMALL_MODEL_CPU, b, 500 * b))
    for _ in range(8):
        fit.observe("step", step_features(2, 900), 10 * step_s(SMALL_MODEL_CPU, 2, 900))
    assert step_s(fit.coefficients, 2, 900) == pytest.approx(10 * step_s(SMALL_MODEL_CPU, 2, 900), rel=0.2)


def test_fit_finds_other_coefficients_despite_noise_and_outliers() -> None:
    draw = random.Random(1)
    true = LLAMA2_70B_8XA800
    fit = CostFit(SMALL_MODEL_CPU)
    for i in range(400):
        n = int(10 ** draw.uniform(2, 5))
        noise = 20.0 if i % 50 == 49 else draw.gauss(1, 0.05)
        fit.observe("prefill", prefill_features([(0, n)]), compute_s(true, 0, n) * noise)
    for n in (1000, 10_000, 60_000):
        assert compute_s(fit.coefficients, 0, n) == pytest.approx(compute_s(true, 0, n), rel=0.15)


def mean_after(samples: int, ratio: Callable[[random.Random], float], mean: float, seed: int = 1) -> float:
    """Predicted time in multiples of `mean` times the true one, on average over the last half of the samples."""
    draw = random.Random(seed)
    fit, told = CostFit(SMALL_MODEL_CPU), []
    for i in range(samples):
        n = int(10 ** draw.uniform(1.5, 3.3))
        fit.observe("prefill", prefill_features([(0, n)]), compute_s(SMALL_MODEL_CPU, 0, n) * ratio(draw))
        if i >= samples // 2:
            told.append(compute_s(fit.coefficients, 0, 500) / compute_s(SMALL_MODEL_CPU, 0, 500) / mean)
    return sum(told) / len(told)


@pytest.mark.parametrize("slower", [2.0, 4.0, 10.0])
def test_under_contention_the_mean_is_found(slower: float) -> None:
    """Half the samples take so many times as long."""
    assert mean_after(800, lambda draw: draw.choice((1.0, slower)), (1.0 + slower) / 2) == pytest.approx(
        1.0, abs=0.05
    )


def test_under_skewed_noise_the_mean_is_found() -> None:
    assert mean_after(800, lambda draw: draw.lognormvariate(-0.125, 0.5), 1.0) == pytest.approx(1.0, abs=0.05)


def test_a_stall_now_and_then_is_no_measurement() -> None:
    calm = mean_after(800, lambda draw: 1000.0 if draw.random() < 0.01 else 1.0, 1.0)
    assert calm == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_a_change_of_regime_is_seen_within_twenty_samples(factor: float, spread: float) -> None:
    draw = random.Random(3)
    fit = CostFit(SMALL_MODEL_CPU)

    def observe(samples: int, scale: float) -> None:
        for _ in range(samples):
            n = int(10 ** draw.uniform(1.5, 3.3))
            noise = draw.lognormvariate(-(spread**2) / 2, spread)
            fit.observe(
                "prefill", prefill_features([(0, n)]), compute_s(SMALL_MODEL_CPU, 0, n) * scale * noise
            )

    observe(500, 1.0)
    observe(20, factor)
    expected = factor * compute_s(SMALL_MODEL_CPU, 0, 500)
    assert compute_s(fit.coefficients, 0, 500) == pytest.approx(expected, rel=0.25)


def test_a_node_that_only_runs_mixed_steps_learns_too() -> None:
    true = replace(
        SMALL_MODEL_CPU, **{f: 3 * getattr(SMALL_MODEL_CPU, f) for f in SMALL_MODEL_CPU.__struct_fields__}
    )
    draw = random.Random(2)
    fit = CostFit(SMALL_MODEL_CPU)
    for _ in range(100):
        chunks, requests = [(draw.randrange(500), draw.randint(16, 256))], draw.randint(1, 8)
        fit.observe_mixed(chunks, requests, 300 * requests, mixed_s(true, chunks, requests, 300 * requests))
    assert compute_s(fit.coefficients, 0, 200) == pytest.approx(compute_s(true, 0, 200), rel=0.05)
    assert step_s(fit.coefficients, 4, 1200) == pytest.approx(step_s(true, 4, 1200), rel=0.05)


def test_what_samples_leave_open_is_the_priors() -> None:
    """Only prompts of one length come. Those of others keep their proportion."""
    fit = CostFit(SMALL_MODEL_CPU)
    for _ in range(300):
        fit.observe("prefill", prefill_features([(0, 100)]), 2 * compute_s(SMALL_MODEL_CPU, 0, 100))
    for n in (10, 1000, 4000):
        ratio = compute_s(fit.coefficients, 0, n) / compute_s(SMALL_MODEL_CPU, 0, n)
        assert ratio == pytest.approx(2.0, rel=0.05)


def test_impossible_samples_are_ignored() -> None:
    fit = CostFit(SMALL_MODEL_CPU)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        fit.observe("load", load_features(100), seconds)
    fit.observe("load", load_features(0), 1.0)
    assert fit.samples("load") == 0


@given(st.lists(st.tuples(st.integers(1, 10**5), st.floats(1e-6, 1e4)), max_size=60))
def test_whatever_is_measured_coefficients_stay_usable(samples: list[tuple[int, float]]) -> None:
    fit = CostFit(SMALL_MODEL_CPU)
    for n, seconds in samples:
        fit.observe("prefill", prefill_features([(0, n)]), seconds)
        c = fit.coefficients
        assert min(c.prefill_fixed_s, c.prefill_token_s, c.prefill_square_s) >= 0.0
        assert 0.0 < compute_s(c, 0, 1000) < 1e9
