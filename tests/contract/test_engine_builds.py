"""Engines on each build of the kernels compute what transformers does: tiny models, weights and KV in either format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers: Any = pytest.importorskip("transformers")

from shared.core.kv.block_keys import blocks_for  # noqa: E402
from shared.engine.api import EngineConfig  # noqa: E402
from shared.engine.attention.api import AttentionBatch, Span  # noqa: E402
from shared.engine.attention.native import NativeAttention  # noqa: E402
from shared.engine.hardware import Hardware  # noqa: E402
from shared.engine.model import ModelEngine  # noqa: E402
from shared.engine.paths.lean import LeanPath  # noqa: E402
from tests.support.engine.builds import TESTED, loaded  # noqa: E402
from tests.support.engine.sequences import Sequences  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"intermediate_size": 90}),  # not a multiple of the kernels' panel size
    "Qwen3": ("Qwen3", {"head_dim": 40}),
}
PROMPT = [97 + (i * 5 + i // 7) % 26 for i in range(150)]


@pytest.fixture(params=TESTED)
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine_on(build: str, folder: Path, dtype: str) -> ModelEngine:
    kernels = loaded(build)
    hardware = Hardware(
        torch.device("cpu"), dtype, partial(NativeAttention, kernels=kernels), kernels=kernels
    )
    config = EngineConfig(str(folder), dtype, kv_bytes=16 << 20, threads=1)
    engine = ModelEngine.load(config, lambda what, fraction: None, hardware)
    assert isinstance(engine._forward, LeanPath)
    return engine


def logits(engine: ModelEngine) -> Any:
    """Logits of every position of PROMPT, computed in three steps: 100 positions, then 49, then the last one."""
    pages = tuple(range(blocks_for(len(PROMPT), engine.spec.layout.block_tokens)))
    parts, tokens = [], torch.tensor(PROMPT)
    for start, end in ((0, 100), (100, 149), (149, 150)):
        batch = AttentionBatch((Span(start, end, pages, 0),))
        with torch.inference_mode():
            parts.append(
                engine._forward.logits(
                    batch, tokens[start:end], torch.arange(end - start), lambda layer: None
                )
            )
    return torch.cat(parts)


def transformers_logits(folder: Path, dtype: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].float()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers_logits(build: str, name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    folder = save_tiny(tmp_path, kind, **config, eos_token_id=None)
    engine = engine_on(build, folder, "float32")
    expected = transformers_logits(folder, torch.float32)
    apart = (logits(engine) - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1)
    engine.close()
    assert float(apart.max()) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_nearer_to_float32_than_transformers_bfloat16(
    build: str, name: str, tmp_path: Path
) -> None:
    kind, config = MODELS[name]
    folder = save_tiny(tmp_path, kind, **config, eos_token_id=None)
    engine = engine_on(build, folder, "bfloat16")
    expected = transformers_logits(folder, torch.float32)
    error = (logits(engine) - expected).pow(2).mean()
    engine.close()
    assert error < (transformers_logits(folder, torch.bfloat16) - expected).pow(2).mean()


def test_generates_what_transformers_generates(build: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, eos_token_id=None)
    engine = engine_on(build, folder, "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [PROMPT[:n] for n in (1, 16, 33, 70)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        expected.append(output[0, len(prompt) :].tolist())
    run = Sequences(engine)
    assert run.generate(prompts, 8) == expected
    assert run.generate(prompts, 8, chunk=7) == expected
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", [[149], [99, 149], [20, 21, 99, 149], [100, 101, 102, 149], []])
def test_rows_that_nobody_looks_at_leave_their_keys_and_values_alone(
    build: str, dtype: str, keep: list[int], tmp_path: Path
) -> None:
    """Two prompts are in one step. The last layer computes only the rows asked for."""
    engine = engine_on(build, save_tiny(tmp_path, eos_token_id=None), dtype)
    batch = AttentionBatch((Span(0, 100, tuple(range(7)), 0), Span(0, 50, (7, 8, 9, 10), 100)))
    layers = list(range(engine.spec.layout.layers))

    def run(rows: list[int]) -> tuple[Any, list[bytes]]:
        told: list[int] = []
        for layer in layers:
            for page in range(11):
                engine.store.slice(page, layer)[:] = bytes(engine.spec.layout.slice_bytes)
        with torch.inference_mode():
            logits = engine._forward.logits(batch, torch.tensor(PROMPT), torch.tensor(rows), told.append)
        assert told == layers
        return logits, [bytes(engine.store.slice(page, layer)) for layer in layers for page in range(11)]

    all_logits, all_pages = run(list(range(150)))
    logits, pages = run(keep)
    engine.close()
    assert pages == all_pages
    assert logits.shape == (len(keep), all_logits.shape[1])
    torch.testing.assert_close(logits, all_logits[keep], rtol=1e-3, atol=1e-3)
