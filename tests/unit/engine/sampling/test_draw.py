"""The counter-based uniform: known values, range, and no visible structure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.sampling.draw import uniform


def test_known_values() -> None:
    """Frozen: another value would change every seeded answer between versions."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**64 - 1, 1 << 20)] == [
        0.8911029577824947,
        0.6847512860829013,
        0.3907537997238245,
        0.20486737666208588,
    ]


@given(st.integers(0, 2**64 - 1), st.integers(0, 1 << 40))
def test_is_a_pure_function_into_the_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0
    assert uniform(seed, position) == uniform(seed, position)


def test_neighbouring_seeds_and_positions_fill_ten_bins_evenly() -> None:
    draws = [uniform(seed, position) for seed in range(100) for position in range(100)]
    bins = [sum(1 for u in draws if i / 10 <= u < (i + 1) / 10) for i in range(10)]
    chi_square = sum((n - 1000) ** 2 / 1000 for n in bins)
    assert chi_square < 27.9, "p < 0.001 for 9 degrees of freedom"
