from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.prediction.output_lengths import PRIOR_MEAN_TOKENS, OutputLengths

LENGTHS = st.lists(st.floats(0.0, 5000.0), max_size=200)


def learnt(lengths: list[float]) -> OutputLengths:
    found = OutputLengths()
    for length in lengths:
        found.observe(length)
    return found


def test_before_anything_is_learnt_answers_are_of_the_usual_length() -> None:
    assert OutputLengths().mean == pytest.approx(PRIOR_MEAN_TOKENS, rel=0.1)


@given(lengths=LENGTHS, age=st.floats(0, 9000), ahead=st.floats(0, 9000))
def test_longer_answers_are_rarer_and_nobody_is_certain_to_end(
    lengths: list[float], age: float, ahead: float
) -> None:
    found = learnt(lengths)
    assert 0.0 < found.longer(age + ahead) <= found.longer(age) <= 1.0
    assert 0.0 < found.still_there(age, ahead) <= 1.0
    assert found.left(age) >= 1.0


def test_it_learns_two_kinds_of_answers() -> None:
    """Half have 20 tokens, half 400: one that has 40 is of the second kind."""
    found = learnt([20.0, 400.0] * 500)
    assert found.longer(40.0) == pytest.approx(0.5, abs=0.03)
    assert found.still_there(40.0, 200.0) > 0.9
    assert found.left(40.0) == pytest.approx(360.0, rel=0.2)


def test_old_answers_count_less_and_less() -> None:
    found = learnt([20.0] * 5000 + [400.0] * 8000)
    assert found.longer(100.0) > 0.9


def test_the_mean_is_the_samples_mean() -> None:
    rng = random.Random(1)
    lengths = [rng.expovariate(1 / 300.0) + 1 for _ in range(4000)]
    assert learnt(lengths).mean == pytest.approx(301.0, rel=0.1)
