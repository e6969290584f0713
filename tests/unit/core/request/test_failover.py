"""The request machine when nodes fall silent, are lost, or give a request up."""

from __future__ import annotations

from shared.core.kv.block_keys import block_keys, pack_tokens
from shared.core.machine import BusFound, BusLost, Ticked
from shared.core.request import events as ev
from shared.protocol.errors import WireError
from tests.support.worlds.request_story import D2, P2, D, P, Story, kinds
from tests.support.worlds.request_world import BLOCK, NAMESPACE

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


def test_no_responders_fail_over_at_once() -> None:
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
