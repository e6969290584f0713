"""From a body to a GenerateRequest: everything is checked here, so that no client mistake reaches a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, UnsetType

from services.gateway.api.body import convert
from services.gateway.api.errors import ContextExceeded
from services.gateway.api.openai_requests import (
    CHOICES_MOST,
    NEUTRAL,
    ChatBody,
    CommonBody,
    CompletionBody,
    Media,
    Message,
)
from services.gateway.api.request import GenerateRequest, Kind, Prompt
from services.gateway.api.sampling_fields import check_bias, sampling_of, stop_token_ids
from services.gateway.api.structured import Asked, asked_of, require_possible
from shared.core.kv.block_keys import pack_tokens
from shared.protocol.errors import Invalid
from shared.protocol.ids import RequestId
from shared.protocol.model import ModelSpec
from shared.text.text import TextModel

MEDIA = tuple(field.name for field in msgspec.structs.fields(Media))
COMPLETION_TOKENS = 16
"""max_tokens of a completion that names none."""


class Checked(Struct, frozen=True):
    """A body that passed all checks that do not need the model."""

    kind: Kind
    body: ChatBody | CompletionBody
    asked: Asked | None = None
    """What the answer must look like."""

    @property
    def model(self) -> str | None:
        return None if isinstance(self.body.model, UnsetType) else self.body.model

    @property
    def chars(self) -> int:
        """Roughly how many characters there are to encode."""
        if isinstance(self.body, ChatBody):
            return sum(len(_content(m)) for m in self.body.messages)
        prompts = self.body.prompt if isinstance(self.body.prompt, list) else [self.body.prompt]
        return sum(len(p) for p in prompts if isinstance(p, str))


def check_body(kind: Kind, raw: Mapping[str, Any], *, always_streams: bool = False) -> Checked:
    """Raises Invalid naming the field. `always_streams`: the front streams whatever the body says."""
    for name, neutral in NEUTRAL.items():
        if raw.get(name) is not None and not any(_same(raw[name], value) for value in neutral):
            raise Invalid(f"{name}: not supported here", param=name)
    body = convert(raw, ChatBody) if kind == "chat" else convert(raw, CompletionBody)
    if body.stream_options is not None and not (body.stream or always_streams):
        raise Invalid("stream_options: only allowed with stream=true", param="stream_options")
    if raw.get("best_of") is not None and (body.n or 1) > raw["best_of"]:
        raise Invalid("best_of: must not be less than n", param="best_of")
    check_bias(body.logit_bias or {})
    if isinstance(body, ChatBody):
        _check_chat(body)
    else:
        _check_prompts(body)
    return Checked(kind, body, asked_of(body))


def complete(
    checked: Checked,
    spec: ModelSpec,
    text: TextModel,
    id_: RequestId,
    fresh_seed: int,
    created: int,
    most_tokens: int,
) -> GenerateRequest:
    """Encode the prompts and check everything against the model. Blocks for long texts. Raises Invalid naming the field.

    `most_tokens`: most tokens (prompt and answer) that any node has room for.
    """
    body = checked.body
    if checked.asked is not None:
        require_possible(checked.asked, spec)
    sampling = sampling_of(body, spec, text.sampling, fresh_seed, checked.asked)
    encoded = _encode_chat(body, text) if isinstance(body, ChatBody) else _encode_prompts(body, spec, text)
    options = body.stream_options
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    prompts = tuple(_fit(ids, body, spec, most_tokens) for ids in encoded)
    if sampling.min_tokens > min(prompt.max_new_tokens for prompt in prompts):
        raise Invalid("min_tokens: more than the answer may have", param="min_tokens")
    return GenerateRequest(
        id=id_,
        kind=checked.kind,
        spec=spec,
        prompts=prompts,
        n=body.n or 1,
        sampling=sampling,
        stop=tuple(stop),
        stop_token_ids=stop_token_ids(body),
        stream=bool(body.stream),
        include_usage=bool(options is not None and options.include_usage),
        grammar_field="" if checked.asked is None else checked.asked.field,
        wants_ids=bool(body.return_token_ids),
        created=created,
    )


# -- chat ------------------------------------------------------------------------------------------------------------


def _check_chat(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise Invalid("top_logprobs: needs logprobs=true", param="top_logprobs")
    for i, message in enumerate(body.messages):
        if message.content is None and not message.tool_calls:
            at = f"messages[{i}].content"
            raise Invalid(f"{at}: must be a string or a list of text parts", param=at)
        _require_text(message, f"messages[{i}]")


def _require_text(message: Message, at: str) -> None:
    """Refuse a message with any part that is not text: see Media."""
    parts = message.content if isinstance(message.content, list) else []
    for j, part in enumerate(parts):
        if part.type != "text":
            param = f"{at}.content[{j}].type"
            raise Invalid(f"{param}: {part.type[:40]!r} is not served here; only text is", param=param)
        if part.text is None:
            raise Invalid(f"{at}.content[{j}].text: must be given", param=f"{at}.content[{j}].text")
    for where, what in [(at, message), *((f"{at}.content[{j}]", part) for j, part in enumerate(parts))]:
        for name in MEDIA:
            if getattr(what, name):
                raise Invalid(f"{where}.{name}: not served here; only text is", param=f"{where}.{name}")


def _encode_chat(body: ChatBody, text: TextModel) -> list[list[int]]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    return [text.render([_template_message(m) for m in body.messages], options)]


def _template_message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message)}
    more = {"name": message.name, "tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
    return plain | {key: value for key, value in more.items() if value is not None}


def _content(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


# -- completions -----------------------------------------------------------------------------------------------------


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """One or several prompts, each text or token ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    texts = [p for p in body.prompt if isinstance(p, str)]
    ids = [p for p in body.prompt if isinstance(p, int)]
    lists = [p for p in body.prompt if isinstance(p, list)]
    if len(body.prompt) not in (len(texts), len(ids), len(lists)):
        raise Invalid("prompt: texts and token ids can't be mixed", param="prompt")
    return [ids] if ids else texts or lists


def _check_prompts(body: CompletionBody) -> None:
    prompts = _prompts(body)
    if not all(prompts):
        raise Invalid("prompt: must not be empty", param="prompt")
    if len(prompts) * (body.n or 1) > CHOICES_MOST:
        raise Invalid(f"prompt: more than {CHOICES_MOST} choices in one request", param="prompt")


def _encode_prompts(body: CompletionBody, spec: ModelSpec, text: TextModel) -> list[list[int]]:
    encoded = [p if isinstance(p, list) else text.encode(p) for p in _prompts(body)]
    for ids in encoded:
        if not ids:
            raise Invalid("prompt: encodes to no token", param="prompt")
        if min(ids) < 0 or max(ids) >= spec.vocab_size:
            raise Invalid(f"prompt: token ids must be in 0..{spec.vocab_size - 1}", param="prompt")
    return encoded


# -- fitting ---------------------------------------------------------------------------------------------------------


def _fit(ids: list[int], body: ChatBody | CompletionBody, spec: ModelSpec, most_tokens: int) -> Prompt:
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    most = min(spec.context_tokens, most_tokens)
    limit = (
        f"context of {most} tokens"
        if most == spec.context_tokens
        else f"{most} tokens that a node has room for"
    )
    if len(ids) >= most:
        raise ContextExceeded(f"{field}: {len(ids)} tokens leave no room in the {limit}", param=field)
    wanted, named = _max_tokens(body)
    if wanted is not None and len(ids) + wanted > most:
        raise ContextExceeded(
            f"{named}: {len(ids)} prompt tokens and {wanted} for the answer exceed the {limit}", param=named
        )
    room = most - len(ids)
    if wanted is None:
        wanted = room if isinstance(body, ChatBody) else min(COMPLETION_TOKENS, room)
    return Prompt(pack_tokens(ids), len(ids), wanted)


def _max_tokens(body: CommonBody) -> tuple[int | None, str]:
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def _same(value: Any, neutral: Any) -> bool:
    """Equal and of the same type: True is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
