"""A policy of a user that raises while requests are placed: a built-in one places those, and people are told."""

from __future__ import annotations

import pytest

from shared.core.conductor.decode_policies import DECODE_POLICIES
from shared.core.conductor.events import NoticePolicyFailed
from shared.core.conductor.placement_policies import POLICIES
from tests.support.fakes.broken_policies import (
    FAILS_FROM_TOKENS,
    ChooseRaises,
    NamesAStranger,
    NamesNobody,
    PredictsNonsense,
    RaisesForLongPrompts,
    Refuses,
)
from tests.support.worlds.cluster_of import ClusterOf, names


def with_policy(monkeypatch: pytest.MonkeyPatch, policy: type, **config: object) -> ClusterOf:
    monkeypatch.setitem(POLICIES, "own", policy)
    return ClusterOf(2, 2, policy="own", **config)


def failures(cluster: ClusterOf) -> list[NoticePolicyFailed]:
    return [c for c in cluster.commands if isinstance(c, NoticePolicyFailed)]


def test_only_the_request_on_which_it_fails_is_placed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = with_policy(monkeypatch, RaisesForLongPrompts)
    assert cluster.place(100).policy == "own"
    placement = cluster.place(FAILS_FROM_TOKENS, attempt="long/0/0")
    assert placement.policy == "kvcache_centric"
    assert placement.reason.endswith("the configured policy failed")
    assert cluster.place(100).policy == "own"
    [failure] = failures(cluster)
    assert failure.attempt == "long/0/0"
    assert failure.error.startswith("RuntimeError: never thought of that (")
    assert "broken_policies.py:" in failure.error
    assert (cluster.machine.placed, cluster.machine.policy_failures) == (3, 1)


@pytest.mark.parametrize("policy", [NamesNobody, NamesAStranger, PredictsNonsense])
def test_a_choice_that_makes_no_sense_is_a_failure(monkeypatch: pytest.MonkeyPatch, policy: type) -> None:
    cluster = with_policy(monkeypatch, policy)
    waits = [cluster.place(1000, attempt=f"a{i}/0/0").predicted.queue_s for i in range(6)]
    assert waits[-1] > 1.0, "the nodes' estimates are sound"
    assert cluster.machine.policy_failures == 6


def test_a_decode_policy_that_fails_is_passed_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODE_POLICIES, "own", ChooseRaises)
    cluster = ClusterOf(2, 2, decode_policy="own")
    assert {names(cluster.place(attempt=f"a{i}/0/0"))[1] for i in range(4)} == {"d-0", "d-1"}
    assert cluster.machine.policy_failures == 4


def test_what_a_policy_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = with_policy(monkeypatch, Refuses)
    error = cluster.refused()
    assert (error.code, error.message, error.retry_after_s) == ("overloaded", "not today", 1.0)
    assert cluster.machine.policy_failures == 0
