"""Answers, and the memory of ended attempts."""

from __future__ import annotations

from shared.core.worker.answers import Answer, EndedAnswers
from shared.protocol.requests import TokenDelta
from shared.protocol.sampling import TokenLogprob


def test_an_answer_tells_what_is_known_from_an_index_on() -> None:
    answer = Answer(4, [7, 8], [TokenLogprob(-1.0), TokenLogprob(-2.0)], cached_tokens=3)
    assert answer.delta("a", 0) == TokenDelta("a", 4, (7, 8), tuple(answer.logprobs), cached_tokens=3)
    assert answer.delta("a", 5) == TokenDelta("a", 5, (8,), (TokenLogprob(-2.0),))
    assert answer.delta("a", 6) is None
    answer.finish = "stop"
    assert answer.delta("a", 9) == TokenDelta("a", 6, finish="stop")


def test_answers_do_not_share_their_lists() -> None:
    Answer().tokens.append(1)
    assert Answer().tokens == []


def test_memory_is_bounded_by_time_and_number() -> None:
    answers = EndedAnswers(10.0, 2)
    for i, name in enumerate("abc"):
        answers.remember(name, Answer(i), float(i))
    assert answers.get("a") is None
    assert len(answers) == 2
    answers.expire(11.5)
    assert answers.get("b") is None
    assert answers.get("c") == Answer(2)
