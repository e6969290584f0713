"""Other architectures than the small model's: random weights, and the same tokens as transformers' own generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers: Any = pytest.importorskip("transformers")

from shared.engine.api import EngineConfig  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from tests.support.sequences import Sequences  # noqa: E402
from tests.support.tiny import save_tiny  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "Mistral": {"sliding_window": None},
    "Olmo2": {},
    "Phi3": {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Granite": {"attention_multiplier": 0.05, "logits_scaling": 3.0},
    "GPT2": {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 4096},
}


@pytest.mark.parametrize("kind", KINDS)
def test_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, kind, **KINDS[kind], eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = load_engine(
        EngineConfig(str(folder), "float32", kv_bytes=16 << 20, threads=1), lambda what, fraction: None
    )
    run = Sequences(engine)
    prompts = [[97 + (i * 5 + n) % 26 for i in range(n)] for n in (1, 16, 33, 70)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        expected.append(output[0, len(prompt) :].tolist())
    assert run.generate(prompts, 8) == expected
    assert run.generate(prompts, 8, chunk=7) == expected
    engine.close()
