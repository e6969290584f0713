from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsukimi.simulate.network import Network, SharedBandwidth
from tsukimi.simulate.timeline import Timeline


def run(links: list[float], flows: list[tuple[float, tuple[int, ...], float]]) -> list[float]:
    """Start flows (start time, links, bytes). Returns the time at which each ended."""
    timeline = Timeline(0.0)
    network = Network(timeline.at)
    built = [SharedBandwidth(speed) for speed in links]
    done: dict[int, float] = {}

    def start(i: int) -> None:
        _, over, size = flows[i]
        network.start(timeline.now, tuple(built[k] for k in over), size, finished, i)
        network.check()

    def finished(i: int) -> None:
        done[i] = timeline.now
        network.check()

    for i, (at, _, _) in enumerate(flows):
        timeline.at(at, start, i)
    timeline.run()
    assert network.earliest_finish() == float("inf")
    moved = [sum(size for _, over, size in flows if k in over) for k in range(len(links))]
    assert [link.moved_bytes for link in built] == pytest.approx(moved)
    return [done[i] for i in range(len(flows))]


def test_a_lone_flow_gets_the_tightest_of_its_links() -> None:
    assert run([10.0, 4.0], [(1.0, (0, 1), 8.0)]) == [3.0]


def test_two_flows_share_and_the_longer_one_speeds_up_when_the_other_ends() -> None:
    assert run([10.0], [(0.0, (0,), 10.0), (0.0, (0,), 30.0)]) == [2.0, 4.0]


def test_a_newcomer_slows_what_flows() -> None:
    assert run([10.0], [(0.0, (0,), 20.0), (1.0, (0,), 5.0)]) == [2.5, 2.0]


def test_flows_on_other_links_do_not_matter() -> None:
    assert run([10.0, 10.0], [(0.0, (0,), 10.0), (0.0, (1,), 10.0)]) == [1.0, 1.0]


def test_nothing_to_move_is_done_at_once() -> None:
    assert run([10.0], [(5.0, (0,), 0.0)]) == [5.0]


def test_a_cancelled_flow_is_never_done_and_gives_its_share_back() -> None:
    timeline = Timeline(0.0)
    network = Network(timeline.at)
    link = SharedBandwidth(10.0)
    done: list[tuple[str, float]] = []
    doomed = network.start(0.0, (link,), 100.0, lambda name: done.append((name, timeline.now)), "doomed")
    network.start(0.0, (link,), 10.0, lambda name: done.append((name, timeline.now)), "other")
    timeline.at(1.0, lambda _: network.cancel(timeline.now, doomed))
    timeline.at(1.5, lambda _: network.cancel(timeline.now, doomed))
    timeline.run()
    assert done == [("other", 1.5)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20), st.sampled_from([(0,), (1,), (0, 1), (0, 2), (1, 2)]), st.integers(1, 50)
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_ends_agree_with_a_simulation_in_small_steps(flows: list[tuple[int, tuple[int, ...], int]]) -> None:
    speeds = [8.0, 4.0, 2.0]
    exact = run(speeds, [(float(at), over, float(size)) for at, over, size in flows])
    left = [float(size) for _, _, size in flows]
    ends = [0.0] * len(flows)
    step, now = 1 / 64, 0.0
    while any(left):
        going = [i for i, (at, _, _) in enumerate(flows) if left[i] and at <= now]
        counts = [sum(k in flows[i][1] for i in going) for k in range(3)]
        for i in going:
            rate = min(speeds[k] / counts[k] for k in flows[i][1])
            left[i] = max(0.0, left[i] - rate * step)
            if not left[i]:
                ends[i] = now + step
        now += step
    assert exact == pytest.approx(ends, abs=step * (len(flows) + 1))
