from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.load_estimate import PENDING_S, LoadEstimate
from shared.protocol.cluster import NodeLoad


def load(
    seq: int = 1, *attempts: str, queue_s: float = 0.0, batch_tokens: int = 0, waiting: int = 0
) -> NodeLoad:
    return NodeLoad(
        "n",
        "1",
        "decode",
        seq,
        "ready",
        attempts=attempts,
        queue_s=queue_s,
        batch_tokens=batch_tokens,
        waiting=waiting,
    )


def test_assignments_count_until_they_are_reported() -> None:
    estimate = LoadEstimate()
    estimate.assigned("a", 0.0, 2.0, 100)
    estimate.assigned("b", 0.5, 1.0, 50)
    assert (estimate.requests, estimate.waiting, estimate.kv_tokens, estimate.queue_s(0.5)) == (
        2,
        2,
        150,
        2.5,
    )
    estimate.reported(load(1, "a", queue_s=1.2, batch_tokens=100), 0.6)
    assert (estimate.requests, estimate.kv_tokens, estimate.queue_s(0.6)) == (2, 150, pytest.approx(2.2))
    estimate.reported(load(2, queue_s=0.0), 0.7)
    assert (estimate.requests, estimate.kv_tokens) == (1, 50)


def test_an_assignment_nobody_reports_is_forgotten() -> None:
    estimate = LoadEstimate()
    estimate.assigned("a", 0.0, 2.0, 100)
    estimate.settle(PENDING_S)
    assert estimate.requests == 1
    estimate.settle(PENDING_S + 0.1)
    assert (estimate.requests, estimate.kv_tokens) == (0, 0)


def test_the_same_attempt_again_counts_once() -> None:
    estimate = LoadEstimate()
    estimate.assigned("a", 0.0, 1.0, 100)
    estimate.assigned("a", 0.1, 1.0, 100)
    assert (estimate.requests, estimate.kv_tokens) == (1, 100)
    estimate.check()


def test_an_old_report_says_nothing() -> None:
    estimate = LoadEstimate(stale_s=5.0)
    estimate.reported(load(1, "a", batch_tokens=9, waiting=3), 0.0)
    estimate.settle(5.0)
    assert (estimate.requests, estimate.waiting, estimate.kv_tokens) == (1, 3, 9)
    estimate.settle(5.1)
    assert (estimate.requests, estimate.waiting, estimate.kv_tokens) == (0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),
            st.one_of(
                st.tuples(st.just("assign"), st.integers(0, 4)),
                st.tuples(st.just("report"), st.sets(st.integers(0, 4))),
                st.tuples(st.just("settle"), st.none()),
            ),
        ),
        max_size=25,
    )
)
def test_counts_equal_those_of_a_plain_list_of_what_happened(
    steps: list[tuple[float, tuple[str, object]]],
) -> None:
    estimate, now, seq = LoadEstimate(stale_s=5.0), 0.0, 0
    pending: dict[str, float] = {}
    reported: set[str] = set()
    reported_s = float("-inf")
    for passed_s, (what, which) in steps:
        now += passed_s
        estimate.settle(now)
        if now - reported_s > 5.0:
            reported = set()
        if what == "assign":
            if f"a{which}" not in reported:
                pending.pop(f"a{which}", None)
                pending[f"a{which}"] = now
            estimate.assigned(f"a{which}", now, 1.0, 10)
        elif what == "report":
            assert isinstance(which, set)
            reported, reported_s, seq = {f"a{i}" for i in which}, now, seq + 1
            for attempt in reported:
                pending.pop(attempt, None)
            estimate.reported(load(seq, *sorted(reported), batch_tokens=10 * len(reported)), now)
        live = {a for a, at in pending.items() if now - at <= PENDING_S}
        assert estimate.requests == len(live) + len(reported)
        assert estimate.kv_tokens == 10 * (len(live) + len(reported))
        estimate.check()
        assert estimate.queue_s(now) >= 0.0
