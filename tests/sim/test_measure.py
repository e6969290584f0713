from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.costs.presets import LLAMA2_70B_8XA800
from shared.core.request.events import Deliver, Finish
from shared.protocol.errors import WireError
from tsukimi.simulate.measure import Measures, mean_of_longest, spread
from tsukimi.simulate.trace import TraceRequest


def requests(count: int) -> list[TraceRequest]:
    return [TraceRequest(i, float(i), 1000, 10, ()) for i in range(count)]


def test_failures_are_counted_apart_and_in_no_time() -> None:
    measures = Measures(requests(10), LLAMA2_70B_8XA800)
    for i in range(9):
        measures.delivered(i, Deliver(0, (1,)), i + 2.0)
        measures.finished(i, f"a{i}", Finish("length", 1000, 10, 500))
    measures.failed(9, WireError("overloaded"))
    summary = measures.summary()
    assert (summary["completed"], summary["rejected"], summary["failed"]) == (9, 1, 0)
    assert summary["ttft_s"] == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert summary["hit_rate"] == 0.5
    assert measures.goodput(5.0, 0.0) == 0.9
    assert measures.goodput(1.0, 0.0) == 0.0


def test_a_request_that_fails_after_its_first_token_counts_in_no_time_either() -> None:
    measures = Measures(requests(2), LLAMA2_70B_8XA800)
    measures.delivered(0, Deliver(0, (1,)), 100.0)
    measures.failed(0, WireError("unavailable"))
    assert measures.summary()["ttft_s"]["mean"] == 0.0
    assert measures.summary()["failed"] == 1


def test_time_between_tokens_spans_runs_and_the_hand_over() -> None:
    measures = Measures(requests(1), LLAMA2_70B_8XA800)
    measures.ran(("a",), 0.0, 1.0, 1, 1.0, 0.0)
    measures.ran(("a", "b"), 1.5, 1.7, 2, 0.1, 0.0)
    measures.ran(("b",), 1.7, 2.2, 5, 0.1, 0.0)
    measures.ran(("a",), 9.0, 9.1, 1, 0.1, 0.0)
    measures.finished(0, "a", Finish("length", 1000, 4, 0))
    assert measures.summary()["tbt_s"]["mean"] == pytest.approx(9.1 - 1.7)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 1e-4), st.integers(1, 50)), min_size=1, max_size=6
    )
)
def test_the_mean_of_the_longest_tenth_is_close_to_that_of_all_intervals_written_out(
    runs: list[tuple[float, float, int]],
) -> None:
    every = sorted((first + growth * i for first, growth, n in runs for i in range(n)), reverse=True)
    longest = every[: ceil(len(every) / 10)]
    intervals = [(first + growth * (n - 1), first, n) for first, growth, n in runs]
    assert mean_of_longest(intervals) == pytest.approx(sum(longest) / len(longest), abs=50 * 1e-4)


def test_percentiles_are_nearest_ranks() -> None:
    values = spread([float(i) for i in range(100, 0, -1)])
    assert values == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert spread([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
