"""Decides from a model's configuration, before any weight is read, whether the model can be served.

Served are decoder-only transformers in which every layer has causal attention, with or without a window, that the
transformers library lets a custom backend compute. Everything that our backends would silently compute wrongly is
refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open

from shared.engine.weights.digest import weights_files
from shared.protocol.errors import Invalid

hf: Any = transformers

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def read_config(folder: Path) -> Any:
    """The model's configuration. Raises Invalid if it is missing, broken, or needs code of its own."""
    try:
        return hf.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise Invalid(f"{folder} has no usable config.json: {e}", param="model") from e


def require_servable(config: Any) -> None:
    """Raises Invalid with the reason if a model of this configuration cannot be served."""
    for reason, applies in _OBSTACLES.items():
        if applies(config):
            raise Invalid(
                f"{config.model_type} models of this kind cannot be served: {reason}", param="model"
            )


def require_whole_weights(folder: Path) -> None:
    """Raises Invalid if a weights file is missing or cut short. Reads headers only."""
    files = weights_files(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(listed - {file.name for file in files}):
            raise Invalid(f"{folder} lacks the weights files {', '.join(missing)}", param="model")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as e:
            raise Invalid(f"{file} is no whole safetensors file: {e}", param="model") from e


def _model_class(config: Any) -> Any:
    return hf.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _other_layers(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return any(kind not in ("full_attention", "sliding_attention") for kind in kinds)


def _rope_follows_length(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE


_OBSTACLES: dict[str, Callable[[Any], bool]] = {
    "they are encoder-decoder": lambda c: bool(c.is_encoder_decoder),
    "transformers has no causal language model for them": lambda c: _model_class(c) is None,
    "they read more than text": lambda c: c.get_text_config() is not c,
    "they keep a recurrent state instead of a KVCache": lambda c: bool(_model_class(c)._is_stateful),
    "their weights are quantized": lambda c: getattr(c, "quantization_config", None) is not None,
    "they compress their KVCache (latent attention)": lambda c: bool(getattr(c, "kv_lora_rank", None)),
    "not all their layers are full or sliding attention (linear, chunked, ...)": _other_layers,
    "their attention is biased by distance (ALiBi)": lambda c: bool(getattr(c, "alibi", False)),
    "their rotary frequencies depend on the length of the sequence": _rope_follows_length,
    "transformers lets no attention backend take over their attention": (
        lambda c: not _model_class(c)._supports_attention_backend
    ),
    "their configuration does not say how long a sequence may be": (
        lambda c: not getattr(c, "max_position_embeddings", None)
    ),
}
