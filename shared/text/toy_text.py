"""The toy's text side: ids 0-255 are bytes, the other ids are special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.text.detokenize import ByteDetokenizer, Detokenizer
from shared.text.text import SamplingDefaults, TokenText

VOCAB_SIZE = 320
BOS, EOS, ROLE = 256, 257, 258
MARKS = {BOS: "<bos>", EOS: "<eos>", ROLE: "<role>"}


class ToyText:
    sampling = SamplingDefaults()

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [ROLE, *f"{message['role']}\n{message['content']}".encode()]
        return [*ids, ROLE, *b"assistant\n"]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(token_bytes)

    def token_text(self, token: int) -> TokenText:
        if token > 255:
            return TokenText(MARKS.get(token, f"<{token}>"), None)
        raw = bytes([token])
        return TokenText(raw.decode("utf-8", "replace"), tuple(raw))


def token_bytes(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""
