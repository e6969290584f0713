"""The bodies of /v1/chat/completions and /v1/completions, with the fields that this gateway knows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from services.gateway.api.structured import StructuredBody
from shared.protocol.sampling import TOP_LOGPROBS_MOST

CHOICES_MOST = 128
STOPS_MOST = 16
STOP_CHARS_MOST = 1024

BIASES_MOST = 1024
STOP_IDS_MOST = 256
REPETITION_MOST = 100.0

TokenCount = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MOST)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class CommonBody(StructuredBody, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    """Extension: may be left out where only one is served."""
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=REPETITION_MOST)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=BIASES_MOST)] | None = None
    """Token id -> -100 (ban) to 100 (nothing else)."""
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=STOP_IDS_MOST)] | None = None
    """Extension: these tokens also end the answer; they are not part of its text."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MOST)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=STOPS_MOST)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    """Extension: continue to max_tokens."""
    return_token_ids: bool | None = None
    """Extension: return the token ids of prompt and answer."""


class Media(Struct, frozen=True, kw_only=True):
    """A part that is not text, declared to be refused. If it were ignored, prompts with other media would share KV."""

    audio: Any = None
    file: Any = None
    image_url: Any = None
    images: Any = None
    input_audio: Any = None
    video_url: Any = None


class Part(Media, frozen=True):
    """A part of a message's content. Only the type "text" is served."""

    type: str
    text: str | None = None


class Message(Media, frozen=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MOST)] | None = None
    reasoning_effort: str | None = None
    """For the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MOST)] | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "image_data": ([],),
    "images": ([],),
    "modalities": (["text"],),
    "multi_modal_data": ({},),
    "prediction": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Features that would change the answer and are not served. Allowed are null and these values, which ask for nothing."""
