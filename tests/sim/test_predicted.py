"""Predicted against real, as results tell it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.core.request.events import Prefilled
from shared.protocol.requests import Placement, Prediction, StageTimes
from tests.support.worlds.traces import dialogues
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.predicted import STAGES, PredictionErrors
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import parse_trace


def told(predicted_s: float, real_s: float) -> Prefilled:
    predicted = Prediction(ttft_s=predicted_s, queue_s=predicted_s)
    return Prefilled(Placement("a/0/0", None, None, predicted=predicted), StageTimes(real_s), real_s)


def test_errors_are_relative_to_the_real_time() -> None:
    errors = PredictionErrors()
    for predicted_s, real_s in ((1.0, 2.0), (4.0, 2.0), (2.0, 2.0)):
        errors.took(told(predicted_s, real_s), None)
    summary = errors.summary()
    assert set(summary) == set(STAGES)
    assert summary["ttft"] == summary["queue"]
    assert summary["ttft"]["relative_p50"] == 0.5
    assert summary["ttft"]["relative_p90"] == 1.0
    assert summary["ttft"]["absolute_p50_s"] == 1.0
    assert summary["ttft"]["absolute_p90_s"] == 2.0
    assert summary["ttft"]["bias"] == pytest.approx(7 / 6 - 1)
    assert summary["tbt"]["count"] == 0


def test_what_takes_no_time_has_no_relative_error() -> None:
    errors = PredictionErrors()
    errors.took(told(1.0, 0.0), 0.5)
    assert errors.summary()["ttft"] == {
        "count": 1,
        "relative_p50": 0.0,
        "relative_p90": 0.0,
        "absolute_p50_s": 1.0,
        "absolute_p90_s": 1.0,
        "bias": 0.0,
    }


def errors_of(speed: float, **config: Any) -> dict[str, Any]:
    lines = list(dialogues(400))
    settings = SimulationConfig(**{"prefill": 4, "decode": 4, **config})
    cluster = SimulatedCluster(settings, list(parse_trace(lines, speed=speed)))
    cluster.run()
    cluster.check()
    predicted: dict[str, Any] = report(cluster)["predicted"]
    return predicted


def test_with_exact_time_models_predictions_come_true() -> None:
    errors = errors_of(1.0)
    assert errors["prefill"]["relative_p50"] < 1e-6
    assert errors["ttft"]["relative_p50"] < 0.03
    assert abs(errors["ttft"]["bias"]) < 0.05


def test_when_decode_nodes_are_full_predictions_still_come_true() -> None:
    """Refused attempts must not leave blocks and work behind that nobody computes."""
    errors = errors_of(8.0, decode=2, kv_tokens=60_000)
    assert errors["ttft"]["relative_p50"] < 0.03
    assert abs(errors["ttft"]["bias"]) < 0.05
    assert errors["prefill"]["absolute_p90_s"] < 1e-3


def test_with_fitted_time_models_the_noise_is_all_that_is_left() -> None:
    """A prompt is one run of the engine here, so its own noise cannot be foreseen: half of the draws are off by more than
    0.67 standard deviations."""
    errors = errors_of(1.0, fitted_costs=True, noise=0.1)
    assert errors["ttft"]["count"] == 400
    assert errors["ttft"]["relative_p50"] < 0.0675 + 0.015
    assert abs(errors["ttft"]["bias"]) < 0.08
