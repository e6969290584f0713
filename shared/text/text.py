"""A model's language: prompts to token ids and token ids to text. Implementations: toy_text, tokenizer_text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

from shared.text.detokenize import Detokenizer


class TokenText(Struct, frozen=True):
    """One token on its own, as logprobs show it."""

    text: str
    bytes: tuple[int, ...] | None
    """None for marks that stand for no text."""


class SamplingDefaults(Struct, frozen=True):
    """How the model's makers would have it sampled, for requests that do not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0


class TextModel(Protocol):
    """Immutable and thread-safe: long prompts are encoded on other threads."""

    sampling: SamplingDefaults

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """A conversation, ready for the assistant's next turn. Raises Invalid with what the template says."""
        ...

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with whatever special tokens the model wants around one."""
        ...

    def detokenizer(self) -> Detokenizer:
        """For one answer. Special tokens have no text."""
        ...

    def token_text(self, token: int) -> TokenText: ...
