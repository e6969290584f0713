"""The text side of a model: prompts to token ids, and token ids to text. Implementations: toy_text, tokenizer_text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

from shared.text.detokenize import Detokenizer


class TokenText(Struct, frozen=True):
    """One token on its own, as logprobs show it."""

    text: str
    bytes: tuple[int, ...] | None
    """None for special tokens, which have no text."""


class SamplingDefaults(Struct, frozen=True):
    """The sampling parameters that the model's authors recommend. They apply where a request does not set them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0


class TextModel(Protocol):
    """Thread-safe, since long prompts are encoded on other threads. Immutable to its callers."""

    sampling: SamplingDefaults

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn. Raises Invalid, with the template's message,
        if the template rejects the messages."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, including the special tokens that the model expects around it."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer, for one answer. Special tokens have no text."""
        ...

    def token_text(self, token: int) -> TokenText: ...
