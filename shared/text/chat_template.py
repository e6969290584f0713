"""Chat templates: the Jinja dialect in which models on the hub define how a conversation becomes a prompt."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.protocol.errors import Invalid


class ChatTemplate:
    """Compiled once; renders on any thread. The template comes with the model and is not trusted, so it runs in Jinja's
    sandbox.

    Raises Invalid if the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as e:
            raise Invalid(f"the model's chat template can't be used: {e}", param="model") from e
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt's text. Raises Invalid, with the template's message, if the template rejects the messages."""
        try:
            return self._template.render(
                {**self._special_tokens, **options, "messages": list(messages), "add_generation_prompt": True}
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as e:
            raise Invalid(f"the model's chat template refuses the messages: {e}", param="messages") from e


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Jinja's `tojson` filter, without its HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)
