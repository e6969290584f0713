"""Architectures other than the small model's, with random weights. Both paths of the engine must give the logits that
transformers computes, and the same tokens as its generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers: Any = pytest.importorskip("transformers")

from msgspec import Struct  # noqa: E402

from shared.engine.api import EngineConfig  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from shared.engine.model import ModelEngine  # noqa: E402
from shared.engine.native.kernels import kernels  # noqa: E402
from shared.engine.paths.api import Forward  # noqa: E402
from shared.engine.paths.lean import LeanPath  # noqa: E402
from tests.support.engine.sequences import Sequences  # noqa: E402
from tests.support.engine.tiny import SIZES, save_tiny  # noqa: E402

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


class Kind(Struct, frozen=True):
    config: dict[str, Any]
    lean: bool
    """Whether the lean path supports it."""


KINDS = {
    "Llama": Kind({"rope_parameters": LLAMA3_ROPE}, True),
    "Llama-tied": Kind({"tie_word_embeddings": True}, True),
    "Llama-narrow": Kind({"intermediate_size": 90}, True),  # not a multiple of the kernels' panel size
    "Llama-biased": Kind({"attention_bias": True}, False),
    "Mistral": Kind({"sliding_window": None}, True),
    "Mistral-sliding": Kind({"sliding_window": 24}, True),
    "Qwen2": Kind({}, True),
    "Qwen2-sliding": Kind({"use_sliding_window": True, "sliding_window": 20, "layer_types": MIXED}, True),
    "Qwen3": Kind({}, True),
    "Gemma2": Kind({"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}, False),
    "Gemma3Text": Kind({"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": MIXED}, False),
    "Phi3": Kind({"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
    "Olmo2": Kind({}, False),
    "GPT2": Kind({"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 4096}, False),
    "Mixtral": Kind({"num_local_experts": 4, "num_experts_per_tok": 2}, False),
    "Qwen3Moe": Kind(
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
        False,
    ),
    "Granite": Kind({"attention_multiplier": 0.05, "logits_scaling": 3.0}, False),
}
BACKENDS = ("cpu", "cpu-general", "torch")
VOCABULARY = SIZES["vocab_size"]
PROMPT = [97 + (i * 5 + i // 7) % 26 for i in range(70)]


class Case(Struct, frozen=True):
    model: Any
    """The model in transformers."""
    engine: ModelEngine


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS)
def case(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    if request.param == "cpu-general" and not KINDS[name].lean:
        pytest.skip("backend cpu takes the general path for this model already")
    folder = save_tiny(tmp_path, name.partition("-")[0], **KINDS[name].config, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(str(folder), "float32", kv_bytes=16 << 20, threads=1, backend=request.param)
    engine = load_engine(config, lambda what, fraction: None)
    assert isinstance(engine, ModelEngine)
    taken = isinstance(engine._forward, LeanPath)
    assert taken == (KINDS[name].lean and request.param == "cpu" and kernels() is not None)
    yield Case(model, engine)
    engine.close()


def test_says_what_transformers_says(case: Case) -> None:
    run = Sequences(case.engine)
    prompts = [[97 + (i * 5 + n) % 26 for i in range(n)] for n in (1, 16, 33, 70)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = case.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        expected.append(output[0, len(prompt) :].tolist())
    assert run.generate(prompts, 8) == expected
    assert run.generate(prompts, 8, chunk=7) == expected


class Watched:
    """Wraps a model's logits function and remembers its last result."""

    def __init__(self, path: Forward) -> None:
        self._path = path
        self.last: Any = None

    def logits(self, *step: Any) -> Any:
        self.last = self._path.logits(*step)
        return self.last

    def close(self) -> None:
        self._path.close()


def test_logits_are_transformers_logits_in_chunks_and_behind_a_cached_prefix(case: Case) -> None:
    with torch.inference_mode():
        expected = case.model(torch.tensor([PROMPT])).logits[0]
    watched = case.engine._forward = Watched(case.engine._forward)
    run = Sequences(case.engine)

    def distance(length: int, pages: tuple[int, ...], **how: int) -> float:
        result = run.prefill(PROMPT[:length], pages, **how)
        assert not result.error, result.error
        assert watched.last.shape == (1, VOCABULARY)
        wanted = expected[length - 1]
        return float((watched.last[0] - wanted).abs().max() / wanted.abs().max().clamp(min=1))

    for length in (1, 16, 33, 70):
        whole, cached = run.pages(length), run.pages(length)
        assert distance(length, whole) < 1e-4
        assert distance(length, run.pages(length), chunk=9) < 1e-4
        blocks = (length - 1) // 16
        run.copy(whole[:blocks], cached[:blocks])
        assert distance(length, cached, start=16 * blocks) < 1e-4
