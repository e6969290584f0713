"""Tiny models with random weights in Hugging Face format, for tests that need real layers but no meaningful text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "eos_token_id": 257,
}


def save_tiny(folder: Path, kind: str = "Llama", **config: Any) -> Path:
    """Save a causal model of `<kind>Config` with random weights. The same arguments give the same weights."""
    torch.manual_seed(1)
    settings = getattr(transformers, f"{kind}Config")(**{**SIZES, **config})
    transformers.AutoModelForCausalLM.from_config(settings).to(torch.bfloat16).save_pretrained(folder)
    return folder
