"""The request machine: its way, what it does when things fail, and that no token is lost or doubled."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core import request_events as ev
from shared.core.blocks import block_keys, pack_tokens, unpack_tokens
from shared.core.lifecycle import InvalidTransition, RequestMachine
from shared.core.worker import BusFound, BusLost, Ticked
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import AttemptState, BlockSource, Placement, Reserved, TokenDelta
from tests.support.request_world import BLOCK, EOS, NAMESPACE, World, answer_of, choice_spec

P = NodeRef("p0", "P")
P2 = NodeRef("p1", "P2")
D = NodeRef("d0", "D")
D2 = NodeRef("d1", "D2")


class Story:
    """Feeds a machine by hand; keeps what it commanded since the last look."""

    def __init__(self, spec: ev.ChoiceSpec | None = None, **config: Any) -> None:
        self.machine = RequestMachine(spec or choice_spec(), ev.LifecycleConfig(**config))
        self.now = 0.0
        self.attempt = ""

    def feed(self, event: Any, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        for c in commands:
            if isinstance(c, ev.AskPlace):
                self.attempt = c.request.attempt
        return [c for c in commands if not isinstance(c, ev.SetTimer)]

    def start(self) -> list[Any]:
        return self.feed(ev.Started())

    def place(self, prefill: NodeRef | None = P, decode: NodeRef | None = D, **more: Any) -> list[Any]:
        return self.feed(ev.PlaceAnswered(self.attempt, Placement(self.attempt, prefill, decode, **more)))

    def reserve(self, node: NodeRef = D) -> list[Any]:
        return self.feed(ev.ReserveAnswered(self.attempt, node.node, Reserved(self.attempt, b"L" * 16, 3)))

    def submit(self, node: NodeRef = P) -> list[Any]:
        return self.feed(ev.SubmitAnswered(self.attempt, node.node))

    def run(self) -> Story:
        self.start()
        self.place()
        self.reserve()
        self.submit()
        return self

    def tokens(self, node: NodeRef, index: int, *ids: int, attempt: str = "", **more: Any) -> list[Any]:
        attempt = attempt or self.attempt
        delta = TokenDelta(attempt, index, ids, **more)
        return self.feed(ev.TokensArrived(attempt, node.node, node.incarnation, delta))

    def synced(self, node: NodeRef, state: Any, delta: TokenDelta | None = None) -> list[Any]:
        return self.feed(ev.SyncAnswered(self.attempt, node.node, AttemptState(self.attempt, state, delta)))


def kinds(commands: list[Any]) -> list[str]:
    return [type(c).__name__ for c in commands]


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


def test_pitfall_3_9_eos_as_first_token_cancels_the_reservation() -> None:
    s = Story().run()
    commands = s.tokens(P, 0, EOS, finish="stop", cached_tokens=0)
    assert kinds(commands) == ["Deliver", "Cancel", "Finish"]
    assert commands[1].node == "d0"
    assert commands[2] == ev.Finish("stop", 10, 1, 0)


def test_ignored_eos_goes_on() -> None:
    s = Story(choice_spec(eos=False)).run()
    assert kinds(s.tokens(P, 0, EOS)) == ["Deliver"]


def test_pitfall_3_10_one_token_is_never_handed_over() -> None:
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
def test_pitfall_3_10_counts_are_exact(most: int) -> None:
    s = Story(choice_spec(most=most)).run()
    s.tokens(P, 0, 5)
    commands = s.tokens(D, 1, *range(most + 5))  # a node that makes too many
    assert commands[0] == ev.Deliver(1, tuple(range(most - 1)))
    assert commands[-1] == ev.Finish("length", 10, most, 0)


def test_pitfall_3_12_cached_tokens_are_those_of_the_first_token_and_below_the_prompt() -> None:
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


# -- silence -----------------------------------------------------------------------------------------------------------


def test_silence_asks_prefill_before_the_first_token_and_decode_after() -> None:
    s = Story().run()
    assert s.feed(Ticked(), after_s=1.1) == [ev.AskSync("p0", s.attempt, 0)]
    assert s.feed(Ticked(), after_s=1.1) == []  # one question out at a time
    assert s.synced(P, "waiting") == []
    s.tokens(P, 0, 10)
    assert s.feed(Ticked(), after_s=1.1) == [ev.AskSync("d0", s.attempt, 1)]


def test_suspicion_and_the_bus_back_ask_at_once() -> None:
    s = Story().run()
    assert s.feed(ev.NodeSuspected("p0", "P")) == [ev.AskSync("p0", s.attempt, 0)]
    s.synced(P, "running")
    assert s.feed(ev.NodeSuspected("p0", "another life")) == []
    s.feed(BusLost())
    assert s.feed(Ticked(), after_s=5) == []
    assert kinds(s.feed(BusFound())) == ["AskSync"]


def test_nodes_get_time_to_come_back_after_the_bus_did() -> None:
    s = Story().run()
    s.feed(BusLost())
    s.feed(BusFound())
    failed = ev.SyncFailed(s.attempt, "p0", WireError("unavailable", "no responders"))
    assert s.feed(failed, after_s=0.5) == []
    s.feed(Ticked(), after_s=1.1)
    assert s.synced(P, "running") == []
    s.feed(Ticked(), after_s=3)
    assert kinds(s.feed(failed)) == ["Cancel", "Cancel", "AskPlace"]


# -- failover ----------------------------------------------------------------------------------------------------------


def test_the_rest_is_placed_again_when_decode_is_lost() -> None:
    s = Story().run()
    s.tokens(P, 0, 10, cached_tokens=8)
    s.tokens(D, 1, 11, 12)
    first = s.attempt
    cancel, ask = s.feed(ev.NodeLost("d0", "D"))
    assert (cancel.node, cancel.attempt) == ("d0", first)
    assert ask.request.attempt != first
    assert ask.request.retry
    assert ask.request.avoid == (("d0", "D"),)
    assert ask.request.prompt_tokens == 13
    assert ask.request.max_new_tokens == 5
    prompt = pack_tokens([*range(1, 11), 10, 11, 12])
    assert list(ask.request.block_keys) == block_keys(NAMESPACE, prompt, BLOCK)
    [reserve] = s.place(decode=D2)
    assert reserve.request.first_index == 3
    assert reserve.request.prompt_tokens == 13
    assert reserve.request.tail_tokens == (12,)
    [submit] = s.reserve(D2)
    assert submit.job.tokens == prompt
    assert submit.job.first_index == 3
    s.submit()
    # What the first attempt still sends is ignored, and its node told once more.
    assert s.tokens(D, 3, 99, attempt=first) == [ev.Cancel("d0", first, "given up before")]
    assert s.tokens(D, 3, 99, attempt=first) == []
    assert s.machine.late == 2
    assert s.tokens(P, 3, 13, cached_tokens=12) == [ev.Deliver(3, (13,))]
    assert s.tokens(D2, 4, 14, 15, 16, 17)[-1] == ev.Finish("length", 10, 8, 8)


def test_a_prefill_node_lost_after_its_token_is_decodes_to_judge() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    assert s.feed(ev.NodeLost("p0", "P")) == [ev.AskSync("d0", s.attempt, 1)]
    assert s.synced(D, "waiting") == []
    s.feed(Ticked(), after_s=1.1)
    assert kinds(s.synced(D, "waiting")) == ["Cancel", "AskPlace"]


def test_a_prefill_node_lost_before_its_token_is_replaced_at_once() -> None:
    s = Story().run()
    assert kinds(s.feed(ev.NodeLost("p0", "P"))) == ["Cancel", "Cancel", "AskPlace"]


def test_pitfall_6_11_no_responders_fail_over_at_once() -> None:
    s = Story()
    s.start()
    s.place()
    s.reserve()
    commands = s.feed(ev.SubmitRefused(s.attempt, "p0", WireError("unavailable", "no responders")))
    assert kinds(commands) == ["Cancel", "Cancel", "AskPlace"]
    assert commands[-1].request.avoid == (("p0", "P"),)


def test_moved_is_placed_again_with_all_its_tokens() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    commands = s.tokens(D, 1, 11, finish="moved")
    assert kinds(commands) == ["Deliver", "Cancel", "AskPlace"]
    assert commands[-1].request.prompt_tokens == 12


def test_a_forgotten_attempt_is_placed_again() -> None:
    s = Story().run()
    s.feed(Ticked(), after_s=1.1)
    assert kinds(s.synced(P, "unknown")) == ["Cancel", "Cancel", "AskPlace"]


def test_a_lost_conductor_costs_a_pause() -> None:
    s = Story()
    s.start()
    assert kinds(s.feed(ev.PlaceRefused(s.attempt, WireError("unavailable")))) == ["AskPlace"]
    pauses = []
    for _ in range(8):
        s.feed(ev.PlaceRefused(s.attempt, WireError("deadline_exceeded")))
        pauses.append(s.machine.next_timer() - s.now)
        assert kinds(s.feed(Ticked(), after_s=pauses[-1])) == ["AskPlace"]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    assert kinds(s.place()) == ["Reserve"]


def test_the_budget_ends_it() -> None:
    s = Story(budget_s=5.0)
    s.start()
    s.feed(ev.PlaceRefused(s.attempt, WireError("unavailable", "no conductor")))
    s.feed(ev.PlaceRefused(s.attempt, WireError("unavailable", "no conductor")))
    assert s.feed(Ticked(), after_s=6) == [ev.Fail(WireError("unavailable", "no conductor"))]
    s = Story(budget_s=5.0).run()
    commands = s.feed(Ticked(), after_s=6)
    assert kinds(commands) == ["Cancel", "Cancel", "Fail"]
    assert commands[-1].error.code == "deadline_exceeded"


def test_a_request_that_takes_node_after_node_down_is_given_up() -> None:
    s = Story(losses_most=2).run()
    s.feed(ev.NodeLost("p0", "P"))
    s.place(P2, D)
    s.reserve()
    s.feed(ev.NodeLost("p1", "P2"))
    s.feed(Ticked(), after_s=1)
    s.place(P, D)
    s.reserve()
    assert kinds(s.feed(ev.NodeLost("p0", "P")))[-1] == "Fail"


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
def test_pitfall_4_4_what_no_node_would_take_fails_at_once(code: str) -> None:
    s = Story()
    s.start()
    s.place()
    s.reserve()
    commands = s.feed(ev.SubmitRefused(s.attempt, "p0", WireError(code, "no", param="prompt")))
    assert kinds(commands) == ["Cancel", "Cancel", "Fail"]
    assert commands[-1].error.param == "prompt"


def test_a_failed_sequence_fails_the_request() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    commands = s.tokens(D, 1, finish="failed", error="NaN")
    assert commands[-1] == ev.Fail(WireError("internal", "NaN"))


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


def test_pitfall_3_1_a_reservation_granted_too_late_is_cancelled() -> None:
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


# -- the law -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    most=st.integers(1, 12),
    prompt=st.integers(1, 9),
    eos_at=st.none() | st.integers(0, 11),
    steps=st.integers(0, 120),
)
def test_whatever_happens_every_token_comes_once_and_in_order(
    seed: int, most: int, prompt: int, eos_at: int | None, steps: int
) -> None:
    spec = choice_spec(prompt, most)
    answer = answer_of(spec, eos_at)
    world = World(
        random.Random(seed),
        spec,
        answer,
        ev.LifecycleConfig(budget_s=1e6, losses_most=10**6, overloads_most=10**6),
    )
    world.feed(ev.Started())
    for _ in range(steps):
        world.chaos()
    world.calm()
    assert world.delivered == answer
    assert world.logprobs == len(answer)
    [end] = world.ended
    assert isinstance(end, ev.Finish)
    assert end.completion_tokens == len(answer)
    assert end.reason == ("stop" if answer[-1] == EOS else "length")
    assert 0 <= end.cached_tokens < prompt


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60), budget_s=st.floats(0.1, 5))
def test_with_little_time_it_ends_once_too(seed: int, steps: int, budget_s: float) -> None:
    spec = choice_spec()
    answer = answer_of(spec, None)
    world = World(
        random.Random(seed),
        spec,
        answer,
        ev.LifecycleConfig(budget_s=budget_s, losses_most=2, overloads_most=1),
    )
    world.feed(ev.Started())
    for _ in range(steps):
        world.chaos()
    world.calm()
    assert len(world.ended) == 1
    assert world.delivered == answer[: len(world.delivered)]
