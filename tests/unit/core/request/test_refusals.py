"""What is shown while a decode node may still refuse, and how an answer ends that no node can hold."""

from __future__ import annotations

from msgspec.structs import replace

from shared.core.kv.block_keys import KEY_BYTES
from shared.core.machine import Ticked
from shared.core.request import events as ev
from shared.core.request.attempt import keys_with
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import TokenDelta
from tests.support.worlds.request_story import D2, D, P, Story, kinds
from tests.support.worlds.request_world import choice_spec

LIMIT_S = 0.1


def limited() -> Story:
    """It runs, and its decode node may refuse it."""
    s = Story()
    s.start()
    (reserve,) = s.place(tbt_limit_s=LIMIT_S)
    assert reserve.request.tbt_limit_s == LIMIT_S
    s.reserve()
    s.submit()
    return s


def test_a_token_is_not_shown_before_the_decode_node_has_taken_the_sequence() -> None:
    s = limited()
    assert kinds(s.tokens(P, 0, 10)) == []
    (shown,) = s.tokens(D, 1)
    assert (shown.index, shown.tokens) == (0, (10,))
    assert kinds(s.tokens(D, 1, 11)) == ["Deliver"]


def test_a_decode_token_shows_too_that_it_was_taken() -> None:
    s = limited()
    s.tokens(P, 0, 10)
    commands = s.tokens(D, 1, 11)
    assert [c.tokens for c in commands] == [(10,), (11,)]


def test_a_word_that_overtakes_the_token_counts() -> None:
    s = limited()
    assert kinds(s.tokens(D, 1)) == []
    assert kinds(s.tokens(P, 0, 10)) == ["Deliver"]


def test_refused_at_its_landing_it_fails_with_the_time_to_wait_and_shows_nothing() -> None:
    s = limited()
    s.tokens(P, 0, 10)
    commands = s.tokens(D, 1, finish="refused", error="too slow", retry_after_s=7.5)
    assert "Deliver" not in kinds(commands)
    assert commands[-1] == ev.Fail(WireError("overloaded", "too slow", retry_after_s=7.5))


def test_a_refusal_that_only_a_question_brings_shows_nothing_either() -> None:
    s = limited()
    s.tokens(P, 0, 10)
    delta = TokenDelta(s.attempt, 0, (10,), (), "refused", "too slow", 0, 7.5)
    commands = s.synced(D, "finished", delta)
    assert "Deliver" not in kinds(commands)
    assert commands[-1].error.code == "overloaded"


def test_when_the_decode_node_is_lost_the_token_is_shown_for_the_next_one_may_not_refuse() -> None:
    s = limited()
    s.tokens(P, 0, 10)
    commands = s.feed(ev.NodeLost(D.node, D.incarnation))
    assert kinds(commands) == ["Cancel", "Deliver", "AskPlace"] or kinds(commands)[-2:] == [
        "Deliver",
        "AskPlace",
    ]
    assert commands[-1].request.retry
    assert kinds(s.place(decode=D2)) == ["Reserve"]


def test_a_client_that_leaves_before_the_decode_node_answers_leaves_nothing_behind() -> None:
    s = limited()
    s.tokens(P, 0, 10)
    commands = s.feed(ev.ClientGone("left"))
    assert kinds(commands) == ["Cancel"] * len(commands)
    assert D.node in {c.node for c in commands}
    assert kinds(s.tokens(D, 1, finish="refused", error="too slow", retry_after_s=1.0)) == []


def test_a_decode_node_that_was_restarted_neither_takes_nor_refuses() -> None:
    s = limited()
    s.tokens(P, 0, 10)
    reborn = NodeRef(D.node, "D-reborn")
    assert kinds(s.tokens(reborn, 1)) == []
    assert kinds(s.tokens(reborn, 1, finish="refused", error="too slow", retry_after_s=1.0)) == []
    commands = s.synced(D, "unknown")
    assert [c.tokens for c in commands if isinstance(c, ev.Deliver)] == [(10,)]
    assert kinds(commands)[-1] == "AskPlace"
    assert commands[-1].request.retry


def test_an_answer_that_is_whole_with_its_first_token_is_shown() -> None:
    s = Story(choice_spec(most=1))
    s.start()
    s.place(decode=None, tbt_limit_s=LIMIT_S)
    s.submit()
    assert kinds(s.tokens(P, 0, 10, finish="length")) == ["Deliver", "Finish"]


def test_an_answer_that_no_node_can_hold_ends_with_what_it_has() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    s.tokens(D, 1, 11, finish="moved")
    commands = s.feed(ev.PlaceRefused(s.attempt, WireError("too_large", "needs 257 KV blocks")))
    assert isinstance(commands[-1], ev.Finish)
    assert (commands[-1].reason, commands[-1].completion_tokens) == ("length", 2)


def test_a_prompt_that_no_node_can_hold_is_too_large() -> None:
    s = Story()
    s.start()
    (fail,) = s.feed(ev.PlaceRefused(s.attempt, WireError("too_large", "needs 257 KV blocks")))
    assert fail.error.code == "too_large"


TOO_LARGE = WireError("too_large", "needs 257 KV blocks")


def moved_with_tokens() -> Story:
    """Two tokens were shown; the rest waits for a place."""
    s = Story().run()
    s.tokens(P, 0, 10)
    s.tokens(D, 1, 11, finish="moved")
    return s


def test_an_answer_that_one_node_cannot_hold_looks_for_another() -> None:
    s = moved_with_tokens()
    s.place(decode=D2)
    commands = s.feed(ev.ReserveRefused(s.attempt, D2.node, TOO_LARGE))
    assert "Fail" not in kinds(commands)
    (ask,) = s.feed(Ticked(), after_s=s.machine.next_timer() - s.now)
    assert (D2.node, D2.incarnation) in ask.request.avoid


def test_an_answer_that_a_prefill_node_cannot_hold_looks_for_another() -> None:
    s = moved_with_tokens()
    s.place(decode=D2)
    s.reserve(D2)
    commands = s.feed(ev.SubmitRefused(s.attempt, P.node, TOO_LARGE))
    assert "Fail" not in kinds(commands)
    (ask,) = s.feed(Ticked(), after_s=s.machine.next_timer() - s.now)
    assert (P.node, P.incarnation) in ask.request.avoid


def test_an_answer_that_node_after_node_cannot_hold_ends_with_what_it_has() -> None:
    s = moved_with_tokens()
    for _ in range(100):
        if s.machine.phase == "waiting":
            s.feed(Ticked(), after_s=s.machine.next_timer() - s.now)
        s.place(decode=D2)
        commands = s.feed(ev.ReserveRefused(s.attempt, D2.node, TOO_LARGE))
        if s.machine.phase == "ended":
            break
    assert isinstance(commands[-1], ev.Finish)
    assert (commands[-1].reason, commands[-1].completion_tokens) == ("length", 2)


def test_an_answer_that_has_tokens_has_no_limit_whatever_the_conductor_says() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    s.tokens(D, 1, 11, finish="moved")
    (reserve,) = s.place(decode=D2, tbt_limit_s=LIMIT_S)
    assert reserve.request.tbt_limit_s == 0.0
    s.reserve(D2)
    s.submit()
    assert kinds(s.tokens(P, 2, 12)) == ["Deliver"]


def test_each_move_is_counted() -> None:
    s = Story().run()
    s.tokens(P, 0, 10)
    s.tokens(D, 1, 11, finish="moved")
    (reserve,) = s.place(decode=D2)
    assert reserve.request.moves == 1


def test_where_token_ids_are_unknown_an_answers_blocks_have_keys_of_its_own() -> None:
    keys = (b"a" * KEY_BYTES, b"b" * KEY_BYTES)
    spec = replace(choice_spec(), prompt=b"", prompt_tokens=10, block_tokens=4, block_keys=keys)
    assert keys_with(spec, [1]) == keys
    longer = keys_with(spec, [1] * 7)
    assert longer[:2] == keys
    assert len(longer) == 4
    assert len(set(longer)) == 4
    assert keys_with(spec, [1] * 3) == longer[:3]
