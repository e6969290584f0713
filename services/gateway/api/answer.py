"""What a generation tells a front: news of its choices, and what it used."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.protocol.sampling import TokenLogprob

FinishReason = Literal["stop", "length"]
LOGPROB_BYTES = 64
"""Bytes that one token's logprob takes in an answer, roughly."""


class TokenEntry(Struct, frozen=True):
    """One token of the answer, with its logprob and where its text begins."""

    token: int
    logprob: TokenLogprob
    text_offset: int


class Update(Struct):
    """News of one choice since the last."""

    choice: int
    text: str = ""
    entries: list[TokenEntry] = []
    """Empty unless logprobs are wanted."""
    ids: list[int] = []
    """All tokens generated, whether their text was sent or held back; empty unless wanted."""
    finish: FinishReason | None = None

    @property
    def size_bytes(self) -> int:
        return (
            len(self.text)
            + 8 * len(self.ids)
            + LOGPROB_BYTES * sum(1 + len(e.logprob.top) for e in self.entries)
        )


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
