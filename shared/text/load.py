"""Loads the text side of an announced model: its tokenizer, chat template and sampling defaults."""

from __future__ import annotations

from pathlib import Path

from shared.io.models import TOY, resolve_model
from shared.protocol.errors import Invalid
from shared.protocol.model import ModelSpec
from shared.text.text import TextModel
from shared.text.tokenizer_text import TokenizerText
from shared.text.toy_text import ToyText


def load_text(spec: ModelSpec, own_model: str = "") -> TextModel:
    """The text side of an announced model. Looks for its folder at the nodes' path, then resolves `own_model` (or the
    model's name) on this machine. Blocks. Raises Invalid if it is in neither place."""
    if spec.path == TOY:
        return ToyText()
    if (Path(spec.path) / "config.json").is_file():
        return TokenizerText(Path(spec.path))
    found = resolve_model(own_model or spec.name)
    if found.path == TOY:
        raise Invalid(f"the nodes serve {spec.name}, this gateway is configured for the toy", param="model")
    return TokenizerText(Path(found.path))
