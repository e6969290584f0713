"""What the toy says: words, scripts, and where an answer began."""

from __future__ import annotations

import math

import pytest

from shared.engine.toy.choice import pick
from shared.engine.toy.model import ScriptedFailure, Transcript, next_logits
from shared.protocol.sampling import SamplingParams
from shared.text.toy_text import EOS, ROLE

CONTENT = b"\x07" * 16


def transcript(*parts: bytes | int) -> Transcript:
    ids = [i for part in parts for i in (part if isinstance(part, bytes) else (part,))]
    return Transcript(bytes(i & 0xFF for i in ids), bytes(i >> 8 for i in ids))


def said(*parts: bytes | int) -> int:
    """The one token that a script leaves possible."""
    (token,) = next_logits(transcript(*parts), CONTENT)
    return token


def test_says_the_script_byte_by_byte_then_eos() -> None:
    text = "é😀".encode()
    for done in range(len(text)):
        assert said(b"<<say:", text, b">>", text[:done]) == text[done]
    assert said(b"<<say:", text, b">>", text) == EOS


def test_an_empty_script_ends_at_once() -> None:
    assert said(b"<<say:>>") == EOS


def test_a_chat_answer_begins_after_the_last_role_header() -> None:
    chat = (ROLE, b"user\n<<say:\nuser\n>>", ROLE, b"assistant\n")
    assert said(*chat) == ord("\n")
    assert said(*chat, b"\nus") == ord("e")
    assert said(*chat, b"\nuser\n") == EOS


def test_only_the_last_message_of_a_chat_scripts_it() -> None:
    chat = (
        ROLE,
        b"user\n<<say:one>>",
        ROLE,
        b"assistant\none",
        EOS,
        ROLE,
        b"user\nmore",
        ROLE,
        b"assistant\n",
    )
    assert len(next_logits(transcript(*chat), CONTENT)) > 20


def test_a_prompt_may_go_on_behind_its_script() -> None:
    assert said(b"<<say:hello>> please") == ord("h")
    assert said(b"<<say:hello>> please", b"he") == ord("l")


def test_without_a_script_the_toy_never_ends() -> None:
    logits = next_logits(transcript(b"abc"), CONTENT)
    assert EOS not in logits
    assert set(logits) == {*b"abcdefghijklmnopqrstuvwxyz "}
    assert ord(" ") not in next_logits(transcript(b"abc "), CONTENT)


@pytest.mark.parametrize(("script", "reason"), [(b"<<fail>>", "told"), (b"<<nan>>", "not finite")])
def test_scripted_failures(script: bytes, reason: str) -> None:
    with pytest.raises(ScriptedFailure, match=reason):
        next_logits(transcript(b"please ", script), CONTENT)


def test_fails_after_as_many_tokens_as_asked() -> None:
    next_logits(transcript(b"<<fail:3>>ab"), CONTENT)
    with pytest.raises(ScriptedFailure):
        next_logits(transcript(b"<<fail:3>>abc"), CONTENT)


LOGITS = {5: 1.0, 6: 3.0, 7: 3.0, 8: 0.0}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert pick(LOGITS, SamplingParams(temperature=0.0), 9) == (6, None)


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    by_k = {pick(LOGITS, SamplingParams(top_k=2, seed=seed), 0)[0] for seed in range(50)}
    by_p = {pick(LOGITS, SamplingParams(top_p=0.4, seed=seed), 0)[0] for seed in range(50)}
    assert by_k == {6, 7}
    assert by_p == {6}


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    _, plain = pick(LOGITS, SamplingParams(temperature=0.0, top_logprobs=4), 0)
    _, warm = pick(LOGITS, SamplingParams(temperature=0.01, top_k=1, top_logprobs=4), 0)
    assert plain is not None
    assert plain == warm
    assert math.isclose(sum(math.exp(logprob) for _, logprob in plain.top), 1.0)
    assert [token for token, _ in plain.top] == [6, 7, 5, 8]
