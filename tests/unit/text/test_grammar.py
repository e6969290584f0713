"""Grammars: what is none is known as such, and a state is the same however one came to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.kv.block_keys import pack_tokens
from shared.protocol.sampling import Grammar
from shared.text import grammar as module
from shared.text.grammar import Follower, GrammarError, byte_tokenizer, problem

END = 256
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tag": {"enum": ["a", "b"]}},
    "required": ["x", "tag"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(POINT))
FULL = b'{"x": -12, "tag": "b"}'


def follower() -> Follower:
    return Follower(byte_tokenizer(257, (END,), END))


def packed(text: bytes) -> bytes:
    return pack_tokens(list(text))


def allowed(bits: bytes) -> set[int]:
    return {i for i in range(257) if bits[i // 8] >> (i % 8) & 1}


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": "wat"}', "wat"),
        ("json_schema", "[1", "EOF"),
        ("json_schema", '{"$ref": "#"}', "nothing follows"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "does not exist"),
        ("json_schema", '{"enum": []}', "nsatisfiable"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "nsatisfiable"),
        ("json_schema", '{"unevaluatedProperties": false}', "Unimplemented"),
        ("regex", "a(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", "nothing follows"),
        ("grammar", 'start: "a" b', "unknown name"),
        ("grammar", 'start: start "a"', "nothing follows"),
        ("grammar", "", "root"),
    ],
)
def test_what_is_no_grammar_is_told_why(kind: Any, text: str, says: str) -> None:
    assert says in problem(Grammar(kind, text))
    with pytest.raises(GrammarError):
        follower().next("a", Grammar(kind, text), b"")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", ""),
        ("json_schema", "{}"),
        ("json_schema", json.dumps(POINT)),
        ("regex", r"\d{3}-\d{4}"),
        ("choice", '["yes", "no \\"way\\"\\n"]'),
        ("grammar", 'start: "a" | "b" start'),
        ("grammar", 'root ::= "a" | "b" root'),
        ("regex", "(a|b|c|d){1,5000}(x{1,1000}){1,1000}"),
    ],
)
def test_grammars_of_all_kinds_can_be_followed(kind: Any, text: str) -> None:
    assert not problem(Grammar(kind, text))
    assert allowed(follower().next("a", Grammar(kind, text), b"").allowed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(FULL)), min_size=1, max_size=8), st.sampled_from("ab"))
def test_a_state_depends_on_the_answer_alone(lengths: list[int], attempt: str) -> None:
    """Whatever was asked before, of this attempt or another: a node that never saw it says the same."""
    known = follower()
    for length in lengths:
        answer = packed(FULL[:length])
        assert known.next(attempt, SCHEMA, answer) == follower().next("other", SCHEMA, answer)


def test_the_end_is_allowed_when_the_answer_is_whole_and_nothing_else_then() -> None:
    state = follower()
    for length in range(len(FULL)):
        step = state.next("a", SCHEMA, packed(FULL[:length]))
        assert FULL[length] in allowed(step.allowed)
        assert END not in allowed(step.allowed)
        assert not step.complete
    last = state.next("a", SCHEMA, packed(FULL))
    assert (allowed(last.allowed), last.complete) == ({END}, True)


def test_where_more_may_follow_the_end_may_too() -> None:
    step = follower().next("a", Grammar("regex", "a+"), packed(b"aa"))
    assert (allowed(step.allowed), step.complete) == ({ord("a"), END}, False)


def test_an_answer_that_does_not_follow_is_an_error_and_does_not_spoil_the_attempt() -> None:
    state = follower()
    with pytest.raises(GrammarError, match="does not follow"):
        state.next("a", SCHEMA, packed(b"{x"))
    assert state.next("a", SCHEMA, b"") == follower().next("a", SCHEMA, b"")


def test_json_has_room_to_indent_but_not_to_get_lost() -> None:
    state = follower()
    blank = set(b" \n\r\t")

    def after(text: bytes) -> set[int]:
        return allowed(state.next("a", SCHEMA, packed(text)).allowed) & blank

    assert after(b"{") == set(b" \r\n")
    assert after(b"{ ") == set()
    assert after(b"{\n") == set(b" \t")
    assert after(b"{\n" + b" " * 32) == set()
    assert ord('"') in allowed(state.next("a", SCHEMA, packed(b"{\n    ")).allowed)


def test_states_are_kept_for_a_bounded_number_of_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_ATTEMPTS", 3)
    monkeypatch.setattr(module, "KEPT_GRAMMARS", 2)
    state = follower()
    for i in range(20):
        step = state.next(f"a{i}", Grammar("choice", json.dumps([f"{i}!"])), packed(str(i).encode()))
        assert allowed(step.allowed) == {ord("!")}
    assert len(state._states) == 3
    assert len(state._fresh) == 2
