"""The request machine: its way through the phases, order, refusals and ends."""

from __future__ import annotations

import pytest
from msgspec import structs

from shared.core.kv.block_keys import unpack_tokens
from shared.core.machine import BusLost, Ticked
from shared.core.request import events as ev
from shared.core.request.machine import InvalidTransition
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import BlockSource, TokenDelta
from shared.protocol.sampling import NO_GRAMMAR, NO_TOKEN, Grammar, SamplingParams
from tests.support.worlds.request_story import D2, D, P, Story, kinds
from tests.support.worlds.request_world import EOS, choice_spec

# -- the ordinary way --------------------------------------------------------------------------------------------------


def test_the_way_of_a_request() -> None:
    s = Story()
    [ask] = s.start()
    assert ask.request.prompt_tokens == 10
    assert ask.request.max_new_tokens == 8
    assert len(ask.request.block_keys) == 2
    assert not ask.request.retry
    sources = (BlockSource(NodeRef("c0", "C"), 0, 2),)
    [reserve] = s.place(sources=sources, pool=NodeRef("c0", "C"), decode_pool=NodeRef("c1", "C1"))
    assert reserve.node == D
    assert reserve.request.tail_tokens == (9, 10)
    assert reserve.request.pool == NodeRef("c1", "C1")
    assert reserve.request.local is None
    [submit] = s.reserve()
    assert submit.node == P
    assert unpack_tokens(submit.job.tokens) == list(range(1, 11))
    assert submit.job.handoff.landing == b"L" * 16
    assert submit.job.sources == sources
    assert s.submit() == []
    assert s.tokens(P, 0, 7, cached_tokens=8) == [ev.Deliver(0, (7,), (), 8)]
    assert s.tokens(D, 1, 8, 9) == [ev.Deliver(1, (8, 9))]
    assert s.tokens(D, 3, 1, 1, 1, 1, 1, finish="length") == [
        ev.Deliver(3, (1, 1, 1, 1, 1)),
        ev.Finish("length", 10, 8, 8),
    ]


def test_local_prefill_needs_no_prefill_node() -> None:
    s = Story()
    s.start()
    [reserve] = s.place(prefill=None)
    assert unpack_tokens(reserve.request.local.tokens) == list(range(1, 11))
    assert s.reserve() == []
    assert kinds(s.tokens(D, 0, 7)) == ["Deliver"]


def test_tokens_may_overtake_the_answer_to_the_job() -> None:
    s = Story()
    s.start()
    s.place()
    s.reserve()
    assert kinds(s.tokens(P, 0, 7)) == ["Deliver"]
    assert s.submit() == []


def test_eos_as_first_token_cancels_the_reservation() -> None:
    s = Story().run()
    commands = s.tokens(P, 0, EOS, finish="stop", cached_tokens=0)
    assert kinds(commands) == ["Deliver", "Cancel", "Finish"]
    assert commands[1].node == "d0"
    assert commands[2] == ev.Finish("stop", 10, 1, 0)


def test_ignored_eos_goes_on() -> None:
    s = Story(choice_spec(eos=False)).run()
    assert kinds(s.tokens(P, 0, EOS)) == ["Deliver"]


def test_one_token_is_never_handed_over() -> None:
    s = Story(choice_spec(most=1))
    s.start()
    [submit] = s.place(decode=None)
    assert submit.job.handoff is None
    s.submit()
    assert s.tokens(P, 0, 7, finish="length") == [ev.Deliver(0, (7,), (), 0), ev.Finish("length", 10, 1, 0)]
    # Even if the conductor offers a decode node.
    s = Story(choice_spec(most=1))
    s.start()
    [submit] = s.place()
    assert isinstance(submit, ev.SubmitPrefill)
    assert submit.job.handoff is None


@pytest.mark.parametrize("most", [2, 3])
def test_counts_are_exact(most: int) -> None:
    s = Story(choice_spec(most=most)).run()
    s.tokens(P, 0, 5)
    commands = s.tokens(D, 1, *range(most + 5))  # a node that makes too many
    assert commands[0] == ev.Deliver(1, tuple(range(most - 1)))
    assert commands[-1] == ev.Finish("length", 10, most, 0)


def test_cached_tokens_are_those_of_the_first_token_and_below_the_prompt() -> None:
    s = Story().run()
    assert s.tokens(P, 0, 7, cached_tokens=10)[0].cached_tokens == 9
    s.tokens(D, 1, 8, cached_tokens=10)
    assert s.machine.cached_tokens == 9


# -- order -------------------------------------------------------------------------------------------------------------


def test_tokens_are_put_in_order_and_repeats_dropped() -> None:
    s = Story().run()
    assert s.tokens(D, 1, 11, 12) == []
    assert s.tokens(D, 1, 11) == []
    assert s.tokens(P, 0, 10, cached_tokens=0) == [ev.Deliver(0, (10, 11, 12), (), 0)]
    assert s.tokens(P, 0, 10) == []
    assert s.machine.order.duplicates == 2


def test_a_gap_is_asked_for_after_a_moment() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    s.tokens(D, 2, 12)
    assert s.feed(Ticked(), after_s=0.05) == []
    assert s.feed(Ticked(), after_s=0.1) == [ev.AskSync("d0", s.attempt, 1)]
    assert s.synced(D, "running", TokenDelta(s.attempt, 1, (11, 12, 13))) == [ev.Deliver(1, (11, 12, 13))]


def test_a_lost_first_token_is_asked_of_both_nodes() -> None:
    s = Story().run()
    s.tokens(D, 1, 11)
    assert [c.node for c in s.feed(Ticked(), after_s=0.2)] == ["p0", "d0"]
    assert s.synced(P, "unknown") == []
    assert s.synced(D, "running", TokenDelta(s.attempt, 0, (10, 11))) == [ev.Deliver(0, (10, 11), (), 0)]


def test_a_first_token_that_nobody_knows_is_made_again() -> None:
    s = Story().run()
    s.tokens(D, 1, 11)
    s.feed(Ticked(), after_s=0.2)
    s.synced(P, "unknown")
    assert kinds(s.synced(D, "running", TokenDelta(s.attempt, 1, (11,)))) == ["Cancel", "AskPlace"]


def test_an_end_that_overtakes_the_last_token_waits_for_it() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    assert s.tokens(D, 2, finish="stop") == []
    assert kinds(s.tokens(D, 1, 11)) == ["Deliver", "Finish"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_overload_at_the_conductor_refuses_a_new_request_only() -> None:
    s = Story()
    s.start()
    error = WireError("overloaded", "busy", retry_after_s=3.0)
    assert s.feed(ev.PlaceRefused(s.attempt, error)) == [ev.Fail(error)]
    s = Story().run()
    s.feed(ev.NodeLost("d0", "D"))
    assert s.feed(ev.PlaceRefused(s.attempt, error)) == []
    assert kinds(s.feed(Ticked(), after_s=1.0)) == ["AskPlace"]


@pytest.mark.parametrize("code", ["unavailable", "deadline_exceeded"])
def test_who_was_kept_waiting_for_the_conductor_is_not_refused_when_it_returns(code: str) -> None:
    s = Story(budget_s=60.0)
    s.start()
    assert kinds(s.feed(ev.PlaceRefused(s.attempt, WireError(code)))) == ["AskPlace"]
    error = WireError("overloaded", "busy", retry_after_s=3.0)
    for _ in range(5):
        assert s.feed(ev.PlaceRefused(s.attempt, error)) == []
        [ask] = s.feed(Ticked(), after_s=1.0)
        assert not ask.request.retry, "it has no rights of a failover"
    s.feed(ev.PlaceRefused(s.attempt, error))
    assert s.feed(Ticked(), after_s=60.0) == [ev.Fail(error)], "when its budget is over it is told why"


def test_overload_at_a_decode_node_is_placed_elsewhere_a_few_times() -> None:
    s = Story(overloads_most=2)
    s.start()
    error = WireError("overloaded", "full", retry_after_s=1.0)
    for _ in range(2):
        s.place()
        s.feed(ev.ReserveRefused(s.attempt, "d0", error))
        [ask] = s.feed(Ticked(), after_s=1.0)
        assert ("d0", "D") in ask.request.avoid
        assert not ask.request.retry
    s.place()
    assert s.feed(ev.ReserveRefused(s.attempt, "d0", error))[-1] == ev.Fail(error)


@pytest.mark.parametrize("code", ["invalid", "too_large", "refused"])
def test_what_no_node_would_take_fails_at_once(code: str) -> None:
    s = Story()
    s.start()
    s.place()
    s.reserve()
    commands = s.feed(ev.SubmitRefused(s.attempt, "p0", WireError(code, "no", param="prompt")))
    assert kinds(commands) == ["Cancel", "Cancel", "Fail"]
    assert commands[-1].error.param == "prompt"


@pytest.mark.parametrize("code", ["invalid", "too_large", "refused"])
def test_a_request_that_is_wrong_says_nothing_about_the_nodes(code: str) -> None:
    """Ten of them: no node is avoided for it, and one that is avoided for a failure of its own stays so."""
    for _ in range(10):
        s = Story()
        s.start()
        s.place()
        commands = s.feed(ev.ReserveRefused(s.attempt, "d0", WireError(code)))
        assert kinds(commands)[-1] == "Fail"
        assert "AskPlace" not in kinds(commands)
    s = Story()
    s.start()
    s.place()
    [_, ask] = s.feed(ev.ReserveRefused(s.attempt, "d0", WireError("unavailable")))
    assert ask.request.avoid == (("d0", "D"),)
    s.place(P, D2)
    assert kinds(s.feed(ev.ReserveRefused(s.attempt, "d1", WireError(code))))[-1] == "Fail"


def test_a_failed_sequence_fails_the_request() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    commands = s.tokens(D, 1, finish="failed", error="NaN")
    assert commands[-1] == ev.Fail(WireError("internal", "NaN"))


@pytest.mark.parametrize(
    ("error", "sampling", "param"),
    [
        (NO_TOKEN, SamplingParams(logit_bias=((98, -100.0),), grammar=Grammar("regex", "ab")), "logit_bias"),
        (NO_TOKEN, SamplingParams(logit_bias=((98, -100.0),), min_tokens=3), "logit_bias"),
        (NO_TOKEN, SamplingParams(min_tokens=3, eos_token_ids=(98,)), "min_tokens"),
        (NO_GRAMMAR + "too deep", SamplingParams(grammar=Grammar("regex", "ab")), "grammar"),
    ],
)
def test_what_a_request_makes_impossible_is_its_own_fault(
    error: str, sampling: SamplingParams, param: str
) -> None:
    s = Story(structs.replace(choice_spec(), sampling=sampling)).run()
    s.tokens(P, 0, 10)
    failed = s.tokens(D, 1, finish="failed", error=error)[-1]
    assert isinstance(failed, ev.Fail)
    assert (failed.error.code, failed.error.param) == ("invalid", param)
    assert "too deep" in failed.error.message or "token 1 of the answer" in failed.error.message


def test_an_impossible_placement_is_an_error() -> None:
    s = Story()
    s.start()
    assert kinds(s.place(decode=None)) == ["Fail"]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_both_nodes() -> None:
    s = Story().run()
    assert s.feed(ev.ClientGone("client left")) == [
        ev.Cancel("d0", s.attempt, "client left"),
        ev.Cancel("p0", s.attempt, "client left"),
    ]
    assert s.machine.outcome == "aborted"
    assert s.feed(Ticked(), after_s=1000) == []


def test_a_reservation_granted_too_late_is_cancelled() -> None:
    s = Story()
    s.start()
    s.place()
    s.feed(ev.ClientGone())
    assert s.reserve() == [ev.Cancel("d0", s.attempt, "given up before")]


def test_a_stop_string_ends_it_with_the_tokens_it_took() -> None:
    s = Story().run()
    s.tokens(P, 0, 10, cached_tokens=4)
    s.tokens(D, 1, 11, 12)
    commands = s.feed(ev.StopMet(2))
    assert kinds(commands) == ["Cancel", "Finish"]
    assert commands[0].node == "d0"
    assert commands[1] == ev.Finish("stop", 10, 2, 4)
    assert s.feed(ev.StopMet(2)) == []


def test_an_illegal_event_raises_with_the_story() -> None:
    s = Story()
    with pytest.raises(InvalidTransition, match="BusLost in new"):
        s.feed(BusLost())
    s.start()
    with pytest.raises(InvalidTransition, match=r"ReserveAnswered in placing(.|\n)*0.000 new: Started"):
        s.reserve()


def test_tokens_of_another_life_are_ignored() -> None:
    s = Story().run()
    assert s.tokens(NodeRef("p0", "another"), 0, 10) == []
    assert s.machine.late == 1
