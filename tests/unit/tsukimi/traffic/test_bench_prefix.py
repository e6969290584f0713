from __future__ import annotations

import pytest

from tsukimi.errors import ToolError
from tsukimi.traffic.bench_prefix import Sample, summarise


def sample(kind: str, ttft_s: float, round_: int = 0) -> Sample:
    return Sample(round_, kind, ttft_s, 2000, 1984)


def test_the_ratio_is_of_medians() -> None:
    samples = [sample("cold", t) for t in (1.0, 2.0, 9.0)] + [sample("warm", t) for t in (0.1, 0.5, 0.6)]
    report = summarise("m", 2000, 3, 0, samples)
    assert (report.cold_ttft_s, report.warm_ttft_s, report.ratio) == (2.0, 0.5, 0.25)


def test_failures_are_counted_apart() -> None:
    report = summarise("m", 2000, 2, 1, [sample("cold", 2.0), sample("warm", 1.0), sample("warm", 1.0, 1)])
    assert (report.cold_ttft_s, report.failures) == (2.0, 1)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ToolError, match="no round"):
        summarise("m", 2000, 1, 2, [sample("cold", 1.0)])
