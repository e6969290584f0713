"""Converts tokens to text as they arrive. A character is returned once it is complete: never in part, never twice.

The returned pieces, joined, equal the text of all tokens decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
HELD_MOST = 4
"""How many tokens may be held back for a character to become complete. A character has at most four bytes, so if it is
still incomplete after that many tokens, it is invalid."""


class Detokenizer(Protocol):
    """The state of one answer."""

    def push(self, token: int) -> str:
        """The text that becomes complete with this token."""
        ...

    def finish(self) -> str:
        """The remaining text at the end of the answer: at most one replacement character, for an incomplete character."""
        ...


class ByteDetokenizer:
    """For vocabularies in which every token is a fixed run of bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies. Decodes a window of the last tokens with and without the newest, and returns the
    difference."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._told = 0
        """How many leading tokens of the window have had their text returned. They stay as context for the next ones."""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        held = len(self._tokens) - self._told
        if text.endswith(REPLACEMENT) and held < HELD_MOST:
            return ""
        return self._tell(text)

    def finish(self) -> str:
        return self._tell(self._decode(self._tokens))

    def _tell(self, text: str) -> str:
        new = text[len(self._decode(self._tokens[: self._told])) :]
        if new:
            del self._tokens[: self._told]
            self._told = len(self._tokens)
        return new
