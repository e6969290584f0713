"""Questions that nobody waits for, and a conductor that was stopped for a while."""

from __future__ import annotations

from typing import Any

from shared.core.conductor.events import GivenUp
from shared.core.conductor.objectives import Objectives
from shared.core.conductor.questions.waited_for import GIVEN_UP_KEPT, WaitedFor
from shared.core.machine import BusFound, BusLost, Ticked
from shared.protocol.requests import PlaceRequest
from tests.support.worlds.cluster_of import ClusterOf

GATEWAY_AHEAD_S = 5e4
"""A gateway's clock is not the conductor's."""
WAITS_S = 5.0


def asked(cluster: ClusterOf, ago_s: float = 0.0) -> dict[str, Any]:
    return {"asker": "g", "asked_at_s": cluster.now - ago_s + GATEWAY_AHEAD_S, "waits_s": WAITS_S}


def ticked(cluster: ClusterOf, seconds: float) -> None:
    """So much time passes; all nodes are heard."""
    for _ in range(round(seconds / 0.25)):
        cluster.now += 0.25
        for node, role in (("p-0", "prefill"), ("d-0", "decode")):
            cluster.report(node, role)  # type: ignore[arg-type]
        cluster.feed(Ticked())


def test_what_was_asked_before_a_pause_is_not_answered_after_it_and_books_nothing() -> None:
    cluster = ClusterOf(1, 1)
    cluster.place(**asked(cluster))
    ticked(cluster, 3.0)
    cluster.now += 15.0
    for ago_s in (15.0, 10.0, 5.1):
        error = cluster.refused(20_000, **asked(cluster, ago_s))
        assert error.code == "deadline_exceeded"
    assert cluster.place(100, **asked(cluster, 4.0)).predicted.queue_s == 0.0, "this one is still waited for"
    assert (cluster.machine.placed, cluster.machine.refused, cluster.machine.expired) == (2, 0, 3)


def test_who_gives_no_time_is_always_answered() -> None:
    cluster = ClusterOf(1, 1)
    cluster.place(**asked(cluster))
    cluster.now += 1.0
    assert cluster.place()


def test_a_word_that_overtakes_its_question_counts() -> None:
    cluster = ClusterOf(1, 1)
    cluster.feed(GivenUp("a/0/0"))
    assert cluster.refused(20_000, attempt="a/0/0").code == "deadline_exceeded"
    assert cluster.place(100, attempt="a/0/1").predicted.queue_s == 0.0
    assert cluster.machine.expired == 1


def test_few_such_words_are_remembered() -> None:
    waited_for = WaitedFor()
    for i in range(2 * GIVEN_UP_KEPT):
        waited_for.given_up(f"a{i}/0/0")
        waited_for.check()
    first, last = (PlaceRequest(f"a{i}/0/0", "toy", 1, (), 1, 1.0) for i in (0, 2 * GIVEN_UP_KEPT - 1))
    assert waited_for.too_late(last, 0.0)
    assert not waited_for.too_late(first, 0.0)


def full() -> ClusterOf:
    cluster = ClusterOf(1, 1, objectives=Objectives(max_wait_s=30.0))
    ticked(cluster, 1.0)
    busy(cluster)
    return cluster


def busy(cluster: ClusterOf) -> None:
    cluster.report("p-0", "prefill", queue_s=90.0, attempts=("x/0/0",), cost_samples=99)
    cluster.report("d-0", "decode", attempts=("x/0/0",), cost_samples=99)


def test_a_judgement_of_load_is_overloaded_only_with_an_up_to_date_picture() -> None:
    cluster = full()
    assert cluster.refused().code == "overloaded"
    cluster.now += 15.0
    busy(cluster)
    assert cluster.refused().code == "unavailable", "nobody ticked for 15 s: we were stopped"
    cluster.feed(Ticked())
    for _ in range(9):
        cluster.now += 0.2
        cluster.feed(Ticked())
        busy(cluster)
        error = cluster.refused()
        assert (error.code, error.retry_after_s) == ("unavailable", 0.5)
    cluster.now += 0.4
    assert cluster.refused().code == "overloaded"


def test_the_same_after_an_outage_of_our_bus() -> None:
    cluster = full()
    cluster.feed(BusLost())
    assert cluster.refused().code == "unavailable"
    cluster.feed(BusFound())
    assert cluster.refused().code == "unavailable"
    ticked(cluster, 2.25)
    busy(cluster)
    assert cluster.refused().code == "overloaded"


def test_what_can_never_fit_is_too_large_whenever_it_is_asked() -> None:
    cluster = full()
    cluster.now += 15.0
    assert cluster.refused(4096 * 16).code == "too_large"
