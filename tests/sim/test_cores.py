from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsukimi.simulate.cores import SharedCores
from tsukimi.simulate.timeline import Timeline


def ends(cores: float, runs: list[tuple[float, float]]) -> list[float]:
    """When engines end that begin at a time and have so many seconds of work each."""
    timeline = Timeline(0.001)
    shared = SharedCores(timeline, cores)
    ended = [0.0] * len(runs)

    def begin(i: int) -> None:
        shared.begin()
        shared.at(shared.now + runs[i][1], end, i)

    def end(i: int) -> None:
        shared.end()
        ended[i] = timeline.now

    for i, (start_s, _) in enumerate(runs):
        timeline.at(start_s, begin, i)
    timeline.run()
    return ended


def test_engines_that_do_not_fill_the_cores_take_their_own_time() -> None:
    assert ends(2.0, [(0.0, 3.0), (1.0, 4.0)]) == pytest.approx([3.0, 5.0])


def test_engines_on_one_core_take_turns() -> None:
    assert ends(1.0, [(0.0, 3.0), (0.0, 3.0)]) == pytest.approx([6.0, 6.0])
    # alone for a second, then half as fast for two, then alone again
    assert ends(1.0, [(0.0, 5.0), (1.0, 1.0)]) == pytest.approx([6.0, 3.0])


def test_cores_that_slow_each_other_are_less_than_two() -> None:
    assert ends(1.5, [(0.0, 3.0), (0.0, 3.0)]) == pytest.approx([4.0, 4.0])


@given(
    runs=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 10.0)), min_size=1, max_size=8),
    cores=st.floats(0.5, 4.0),
)
def test_no_engine_is_faster_than_alone_and_no_work_is_done_twice(
    runs: list[tuple[float, float]], cores: float
) -> None:
    ended = ends(cores, runs)
    for (start_s, work_s), end_s in zip(runs, ended, strict=True):
        assert end_s >= start_s + work_s - 1e-6
    first = min(start_s for start_s, _ in runs)
    assert sum(work_s for _, work_s in runs) <= max(1.0, cores) * (max(ended) - first) + 1e-6
