from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.prediction.decode_forecast import DecodeForecast
from shared.core.conductor.prediction.output_lengths import OutputLengths


def hundred() -> OutputLengths:
    """All answers have about a hundred tokens."""
    lengths = OutputLengths()
    for _ in range(2000):
        lengths.observe(100.0)
    return lengths


def test_what_is_being_prefilled_is_not_in_the_batch_now_but_will_be() -> None:
    forecast, lengths = DecodeForecast(2.0), hundred()
    forecast.assigned("a/0/0", 0.0, 5.0, 1000)
    assert forecast.now(1.0) == (0.0, 0.0)
    assert forecast.at(4.0, 1.0, lengths) == (0.0, 0.0)
    requests, tokens = forecast.at(6.0, 1.0, lengths)
    assert requests == pytest.approx(1.0, abs=0.05)
    assert tokens == pytest.approx(1020.0, rel=0.05)
    assert forecast.now(6.0)[0] == 1.0


def test_a_landing_prompt_meets_all_that_runs_and_all_that_is_on_its_way() -> None:
    forecast, lengths = DecodeForecast(2.0), hundred()
    forecast.assigned("a/0/0", 0.0, 0.0, 1000)
    forecast.reported(("a/0/0",), 0.1, 0.0, 0.0, lengths)
    forecast.assigned("b/0/0", 0.5, 9.0, 500)
    forecast.assigned("c/0/0", 0.5, 3.0, 250)
    requests, tokens = forecast.landing(1.0)
    assert requests == 3.0
    assert tokens == pytest.approx(1000 + 10 + 500 + 250)
    forecast.released("b/0/0")
    assert forecast.landing(1.0)[0] == 2.0


def test_what_runs_will_have_ended() -> None:
    forecast, lengths = DecodeForecast(2.0), hundred()
    forecast.assigned("a/0/0", 0.0, 0.0, 1000)
    forecast.reported(("a/0/0",), 0.1, 0.0, 0.5, lengths)
    assert forecast.at(1.5, 0.5, lengths)[0] == pytest.approx(1.0, abs=0.1)
    assert forecast.at(20.5, 0.5, lengths)[0] == pytest.approx(0.0, abs=0.1)
    assert 5.0 < forecast.drained_s(0.5, 0.5, lengths) < 20.0


def test_the_end_of_a_sequence_tells_how_long_it_was() -> None:
    forecast, lengths = DecodeForecast(2.0), OutputLengths()
    for i in range(400):
        at_s = 100.0 * i
        forecast.assigned(f"r{i}/0/0", at_s, at_s, 10)
        forecast.reported((f"r{i}/0/0",), 0.1, 0.0, at_s, lengths)
        forecast.reported((), 0.1, 0.0, at_s + 5.0, lengths)
    assert lengths.mean == pytest.approx(50.0, rel=0.25)


def test_a_sequence_nobody_assigned_here_counts_as_an_average_one() -> None:
    forecast = DecodeForecast(2.0)
    forecast.reported(("x/0/0", "y/0/0"), 0.1, 700.0, 3.0, OutputLengths())
    assert forecast.now(3.0) == (2.0, 1400.0)


def test_what_never_comes_is_forgotten() -> None:
    forecast, lengths = DecodeForecast(2.0), hundred()
    forecast.assigned("a/0/0", 0.0, 50.0, 1000)
    forecast.assigned("b/0/0", 0.0, 50.0, 1000)
    forecast.reported(("b/0/0",), 0.1, 0.0, 1.0, lengths)
    forecast.reported(("c/0/0",), 0.1, 0.0, 2.5, lengths)
    assert forecast.at(51.0, 2.5, lengths)[0] == pytest.approx(0.0, abs=0.1)
    forecast.assigned("d/0/0", 3.0, 50.0, 1000)
    forecast.released("d/0/0")
    assert forecast.at(51.0, 3.0, lengths)[0] == pytest.approx(0.0, abs=0.1)


@given(
    landings=st.lists(st.floats(0.0, 30.0), max_size=20),
    now=st.floats(0.0, 30.0),
    ahead=st.floats(0.0, 30.0),
)
def test_no_more_is_expected_than_was_assigned(landings: list[float], now: float, ahead: float) -> None:
    forecast, lengths = DecodeForecast(2.0), OutputLengths()
    for i, landing_s in enumerate(landings):
        forecast.assigned(f"r{i}/0/0", 0.0, landing_s, 100)
    requests, tokens = forecast.at(now + ahead, now, lengths)
    assert 0.0 <= requests <= len(landings) + 1e-9
    assert tokens >= 100 * requests - 1e-6
    forecast.check()


def test_who_is_in_no_report_is_forgotten_though_the_reports_stay_the_same() -> None:
    """An answer may begin and end between two reports of an idle node, or never come."""
    forecast, lengths = DecodeForecast(pending_s=2.0), OutputLengths()
    forecast.reported((), 0.05, 0.0, 10.0, lengths)
    for i in range(100):
        forecast.assigned(f"brief{i}/0/0", 10.0, 10.1, 500)
        forecast.assigned(f"late{i}/0/0", 10.0, 99.0, 500)
    forecast.reported((), 0.05, 0.0, 11.9, lengths)
    assert forecast.landing(11.9)[0] == 200.0, "the reports of them may be on their way"
    forecast.reported((), 0.05, 0.0, 12.1, lengths)
    assert forecast.landing(12.1) == (0.0, 0.0)
    forecast.check()
