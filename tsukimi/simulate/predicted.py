"""Predicted against real: how far the conductor's predictions were off, by stage."""

from __future__ import annotations

from math import ceil
from typing import Any

from shared.core.request.events import Prefilled

STAGES = ("ttft", "tbt", "queue", "transfer", "prefill")
Pairs = dict[str, list[tuple[float, float]]]


class PredictionErrors:
    """Collects pairs of predicted and real seconds, of attempts whose prompt was computed."""

    def __init__(self) -> None:
        self._pairs: Pairs = {stage: [] for stage in STAGES}

    def took(self, told: Prefilled, tbt_s: float | None) -> None:
        """`tbt_s`: real mean time between the answer's tokens, None if it had too few."""
        predicted, stages = told.placement.predicted, told.stages
        self._pairs["ttft"].append((predicted.ttft_s, told.ttft_s))
        self._pairs["queue"].append((predicted.queue_s, stages.queue_s))
        self._pairs["transfer"].append((predicted.transfer_s, stages.transfer_s))
        self._pairs["prefill"].append((predicted.prefill_s, stages.prefill_s))
        if tbt_s is not None:
            self._pairs["tbt"].append((predicted.tbt_s, tbt_s))

    def summary(self) -> dict[str, Any]:
        return {stage: _errors(pairs) for stage, pairs in self._pairs.items()}


def _errors(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """`relative`: |predicted / real - 1|, where the stage took any time. `absolute_s`: |predicted - real| of all. `bias`:
    sum of predictions / sum of real times - 1; 0 if nothing took any time."""
    relative = sorted([abs(predicted / real - 1.0) for predicted, real in pairs if real > 0.0])
    absolute = sorted([abs(predicted - real) for predicted, real in pairs])
    whole = sum([real for _, real in pairs])
    return {
        "count": len(pairs),
        "relative_p50": _percentile(relative, 50),
        "relative_p90": _percentile(relative, 90),
        "absolute_p50_s": _percentile(absolute, 50),
        "absolute_p90_s": _percentile(absolute, 90),
        "bias": sum([predicted for predicted, _ in pairs]) / whole - 1.0 if whole else 0.0,
    }


def _percentile(values: list[float], percent: int) -> float:
    """Nearest rank of growing values; 0 for none."""
    return values[ceil(len(values) * percent / 100) - 1] if values else 0.0
