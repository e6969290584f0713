"""Tokens to text as they come: a character is given out when it is whole, never in part, never twice.

Whatever the grouping of the tokens, the pieces joined are the text of all of them decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
HELD_MOST = 4
"""A character has at most four bytes: what more tokens than that leave incomplete is no character."""


class Detokenizer(Protocol):
    """State of one answer."""

    def push(self, token: int) -> str:
        """The text that has become whole with this token."""
        ...

    def finish(self) -> str:
        """What is left at the real end: at most one replacement character for an unfinished one."""
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
    """For all others: decodes a window of the last tokens with and without the newest, and gives out the difference."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._told = 0
        """Leading tokens of the window whose text is out; they stay as context for the next."""

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
