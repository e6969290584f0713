"""What an answer must look like. The several ways to ask for it become one grammar, which is known to be valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.errors import Invalid
from shared.protocol.model import ModelSpec
from shared.protocol.sampling import Grammar
from shared.text.grammar import problem

GRAMMAR_CHARS_MOST = 131_072

Schema = str | dict[str, Any]
"""A JSON schema: text, or the object itself."""
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class JsonSchema(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    strict: bool | None = None
    """Answers follow the schema whatever this says."""


class ResponseFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredBody(Struct, frozen=True, kw_only=True):
    """Fields of a body; only one of them may ask for something."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    """Extensions, as is `structured_outputs`."""
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class Asked(Struct, frozen=True):
    field: str
    grammar: Grammar


def asked_of(body: StructuredBody) -> Asked | None:
    """Raises Invalid naming the field. Does not check that the grammar is valid."""
    all_asked = list(_asked(body))
    if len(all_asked) > 1:
        one, other = all_asked[0].field, all_asked[1].field
        raise Invalid(f"{other}: {one} says already what the answer must look like", param=other)
    for asked in all_asked:
        if len(asked.grammar.text) > GRAMMAR_CHARS_MOST:
            raise Invalid(f"{asked.field}: more than {GRAMMAR_CHARS_MOST} characters", param=asked.field)
        return asked
    return None


def require_possible(asked: Asked, spec: ModelSpec) -> None:
    """Blocks while the grammar compiles. Raises Invalid naming the field."""
    if not spec.eos_token_ids:
        raise Invalid(f"{asked.field}: {spec.name} has no token to end an answer with", param=asked.field)
    if why := problem(asked.grammar):
        raise Invalid(f"{asked.field}: {why}", param=asked.field)


def _asked(body: StructuredBody) -> Iterator[Asked]:
    form = body.response_format
    if form is not None and form.type == "json_object":
        yield Asked("response_format", Grammar("json_object"))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            at = "response_format.json_schema"
            raise Invalid(f"{at}: must be given", param=at)
        yield Asked("response_format", _schema(form.json_schema.schema))
    yield from _extension(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )
    more = body.structured_outputs
    if more is not None:
        yield from _extension("structured_outputs.", more.json, more.regex, more.choice, more.grammar)
        if more.json_object:
            yield Asked("structured_outputs.json_object", Grammar("json_object"))


def _extension(
    prefix: str, schema: Schema | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Asked]:
    if schema is not None:
        yield Asked(prefix + "json", _schema(schema))
    if regex is not None:
        yield Asked(prefix + "regex", Grammar("regex", regex))
    if choice is not None:
        yield Asked(prefix + "choice", Grammar("choice", _text(choice)))
    if grammar is not None:
        yield Asked(prefix + "grammar", Grammar("grammar", grammar))


def _schema(schema: Schema) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else _text(schema))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
