"""What an answer must look like: every way to say it, and what is refused with the name of the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.gateway.api.structured import GRAMMAR_CHARS_MOST
from services.gateway.api.validate import check_body, complete
from shared.engine.toy.engine import toy_spec
from shared.protocol.errors import Invalid
from shared.protocol.model import ModelSpec
from shared.protocol.sampling import Grammar
from shared.text.toy_text import ToyText

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OBJECT = Grammar("json_object")
BY_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
YES_NO = Grammar("choice", '["yes","no"]')


def grammar(spec: ModelSpec | None = None, **more: Any) -> Grammar | None:
    body = {"model": "toy", "prompt": "hello", "max_tokens": 50} | more
    checked = check_body("completion", body)
    return complete(checked, spec or toy_spec(), ToyText(), "r", 1, 0, 1 << 20).sampling.grammar


def schema_format(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema} | more}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": schema_format()}, BY_SCHEMA),
        ({"response_format": schema_format(strict=True, description="what it is for")}, BY_SCHEMA),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_json": BY_SCHEMA.text}, BY_SCHEMA),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["yes", "no"]}, YES_NO),
        ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, YES_NO),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"choice": ["yes", "no"]}, "response_format": {"type": "text"}}, YES_NO),
    ],
)
def test_all_ways_to_say_it(body: dict[str, Any], expected: Grammar | None) -> None:
    assert grammar(**body) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": schema_format(None)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"type": "wat"})}, "response_format"),
        ({"response_format": schema_format({"$ref": "#"})}, "response_format"),
        ({"response_format": schema_format({"enum": ["x" * GRAMMAR_CHARS_MOST]})}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex"),
        ({"guided_regex": "a" * 1_000_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as e:
        grammar(**body)
    assert e.value.param == param
    assert len(e.value.message) < 1000


def test_a_model_without_an_end_can_not_be_held_to_a_grammar() -> None:
    with pytest.raises(Invalid, match="no token to end an answer with") as e:
        grammar(msgspec.structs.replace(toy_spec(), eos_token_ids=()), guided_regex="a")
    assert e.value.param == "guided_regex"
