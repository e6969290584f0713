"""The text side of a model folder in Hugging Face format. Does not import torch, even if it is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from shared.protocol.errors import Invalid
from shared.text.chat_template import ChatTemplate
from shared.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from shared.text.text import SamplingDefaults, TokenText


class TokenizerText:
    def __init__(self, folder: Path) -> None:
        """Raises Invalid if the folder has no tokenizer.json, or a file that it needs cannot be read."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise Invalid(f"{folder} has no tokenizer.json", param="model")
        self._tokenizer = _read_tokenizer(path)
        self._config = _read_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._config)
        self.sampling = _sampling_defaults(_read_json(folder / "generation_config.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {id_: token.content for id_, token in added.items()}
        self._marks = frozenset(id_ for id_, token in added.items() if token.special)
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        self._bytes_of_char = _bytes_of_char() if decoder.get("type") == "ByteLevel" else None
        self._known: dict[int, bytes] = {}

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        if self._template is None:
            raise Invalid("the model has no chat template; use /v1/completions", param="messages")
        text = self._template.render(messages, options)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)  # the template has added them

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def detokenizer(self) -> Detokenizer:
        if self._bytes_of_char is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, token: int) -> TokenText:
        if token in self._marks:
            return TokenText(self._added[token], None)
        if self._bytes_of_char is not None:
            raw = self._token_bytes(token)
            return TokenText(raw.decode("utf-8", "replace"), tuple(raw))
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return TokenText(text, tuple(text.encode()))

    def _token_bytes(self, token: int) -> bytes:
        raw = self._known.get(token)
        if raw is None:
            raw = self._known[token] = self._look_up(token)
        return raw

    def _look_up(self, token: int) -> bytes:
        if token in self._marks:
            return b""
        piece = self._added.get(token) or self._tokenizer.id_to_token(token) or ""
        assert self._bytes_of_char is not None
        if all(char in self._bytes_of_char for char in piece):
            return bytes(self._bytes_of_char[char] for char in piece)
        return piece.encode()


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises no more specific type
        raise Invalid(f"{path} is no tokenizer: {e}", param="model") from e


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise Invalid(f"{path} is not valid JSON: {e}", param="model") from e
    return content


def _chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        source = {t["name"]: t["template"] for t in source}.get("default")
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The names by which templates refer to special tokens (bos_token, eos_token, ...), and their text."""
    named = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {name: token for name, token in named.items() if isinstance(token, str)}


def _bytes_of_char() -> dict[str, int]:
    """The byte-level alphabet: a printable byte is written as its own character, any other byte as one from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """The sampling parameters in generation_config.json; those it does not set keep their defaults. Raises Invalid if one
    has an invalid value."""
    given = {
        name: generation[name]
        for name in SamplingDefaults.__struct_fields__
        if generation.get(name) is not None
    }
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as e:
        raise Invalid(f"generation_config.json: {e}", param="model") from e
