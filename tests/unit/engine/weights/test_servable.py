"""Models that cannot be served are refused at load, with the reason, mostly before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers: Any = pytest.importorskip("transformers")

from shared.engine.api import EngineConfig  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from shared.engine.weights.servable import require_servable  # noqa: E402
from shared.protocol.errors import Invalid  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402


def load(folder: Path, **config: Any) -> None:
    stages: list[str] = []
    settings = EngineConfig(str(folder), "float32", kv_bytes=1 << 20, threads=1)
    load_engine(settings, lambda what, fraction: stages.append(what)).close()


REFUSED = [
    ("T5Config", {}, "encoder-decoder"),
    ("MambaConfig", {}, "recurrent state"),
    ("JambaConfig", {}, "recurrent state|not all their layers"),
    ("Llama4TextConfig", {}, "not all their layers"),
    ("DeepseekV3Config", {}, "latent"),
    ("BloomConfig", {}, "take over|how long"),
    ("ViTConfig", {}, "no causal language model"),
    ("LlamaConfig", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "depend on the length",
    ),
]


@pytest.mark.parametrize(
    ("kind", "settings", "reason"), REFUSED, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(REFUSED)]
)
def test_other_kinds_of_model_are_refused_with_the_reason(
    kind: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Invalid, match=reason) as refused:
        require_servable(getattr(transformers, kind)(**settings))
    assert refused.value.param == "model"


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaConfig", {}),
        ("Qwen2Config", {}),
        ("Qwen3Config", {}),
        ("MistralConfig", {"sliding_window": None}),
        ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    ],
)
def test_plain_decoders_are_not(kind: str, settings: dict[str, Any]) -> None:
    require_servable(getattr(transformers, kind)(**settings))


def test_the_obstacle_is_found_before_weights_are_looked_for(tmp_path: Path) -> None:
    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(Invalid, match="recurrent state"):
        load(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Invalid, match=r"holds no \*\.safetensors"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Invalid, match="model-00002-of-00002"):
        load(tmp_path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    file = save_tiny(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Invalid, match="no whole safetensors file"):
        load(tmp_path)


def test_a_missing_tensor_is_refused_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save_tiny(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(Invalid, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save_tiny(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(Invalid, match=r"model\.norm\.weight|cannot be loaded"):
        load(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save_tiny(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(Invalid, match="damaged"):
        load(tmp_path)


def test_attention_features_that_only_show_when_it_runs_are_refused(tmp_path: Path) -> None:
    """GPT-OSS lets part of the attention go to no token, which no backend here computes."""
    folder = save_tiny(tmp_path, "GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    with pytest.raises(Invalid, match="s_aux"):
        load(folder)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Invalid, match=r"config\.json"):
        load(tmp_path)


def test_too_little_memory_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid) as refused:
        load_engine(
            EngineConfig(str(save_tiny(tmp_path)), "float32", kv_bytes=1000), lambda what, fraction: None
        )
    assert refused.value.param == "kv_bytes"


@pytest.mark.parametrize(("field", "value"), [("dtype", "int8"), ("backend", "magic")])
def test_unknown_choices_are_refused(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(Invalid) as refused:
        load_engine(EngineConfig(str(save_tiny(tmp_path)), **{field: value}), lambda what, fraction: None)
    assert refused.value.param == field
