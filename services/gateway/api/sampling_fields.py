"""How the next token is drawn, from a body's fields, the model's defaults and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from services.gateway.api.openai_requests import ChatBody, CommonBody, CompletionBody
from services.gateway.api.structured import Asked
from shared.protocol.errors import Invalid
from shared.protocol.model import ModelSpec
from shared.protocol.sampling import BIAS_MOST, SamplingParams
from shared.text.text import SamplingDefaults

T = TypeVar("T")

U64 = (1 << 64) - 1


def check_bias(bias: Mapping[str, Any]) -> None:
    """Check what can be checked without the model. Raises Invalid."""
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and key == str(int(key))):
            raise Invalid(f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= BIAS_MOST:
            bounds = f"a number from -{BIAS_MOST:g} to {BIAS_MOST:g}"
            raise Invalid(f"logit_bias: that of token {key} must be {bounds}", param="logit_bias")


def sampling_of(
    body: CommonBody, spec: ModelSpec, defaults: SamplingDefaults, fresh_seed: int, asked: Asked | None
) -> SamplingParams:
    """Raises Invalid naming the field."""
    if body.top_k is not None and body.top_k > spec.vocab_size:
        raise Invalid(f"top_k: {body.top_k} is more than the vocabulary of {spec.vocab_size}", param="top_k")
    top_logprobs = _top_logprobs(body)
    if top_logprobs is not None and top_logprobs > spec.vocab_size:
        raise Invalid(f"top_logprobs: more than the vocabulary of {spec.vocab_size}", param="top_logprobs")
    stop_ids = stop_token_ids(body)
    _require_known("stop_token_ids", stop_ids, spec)
    bias = tuple((int(key), float(value)) for key, value in (body.logit_bias or {}).items())
    _require_known("logit_bias", [id_ for id_, _ in bias], spec)
    if asked is not None and body.ignore_eos:
        raise Invalid(f"ignore_eos: {asked.field} says where the answer ends", param="ignore_eos")
    eos = () if body.ignore_eos and stop_ids else spec.eos_token_ids
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        seed=_or(body.seed, fresh_seed) & U64,
        top_logprobs=top_logprobs,
        eos_token_ids=tuple(dict.fromkeys((*eos, *stop_ids))),
        ignore_eos=bool(body.ignore_eos) and not stop_ids,
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        min_tokens=body.min_tokens or 0,
        grammar=asked.grammar if asked is not None else None,
    )


def stop_token_ids(body: CommonBody) -> tuple[int, ...]:
    return tuple(dict.fromkeys(body.stop_token_ids or ()))


def _require_known(field: str, ids: list[int] | tuple[int, ...], spec: ModelSpec) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < spec.vocab_size):
        raise Invalid(f"{field}: token ids must be in 0..{spec.vocab_size - 1}", param=field)


def _top_logprobs(body: CommonBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    return (body.top_logprobs or 0) if body.logprobs else None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
