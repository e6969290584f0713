"""FlashInfer against the reference backend, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (extra `gpu`)")

from shared.engine.api import Engine, EngineConfig  # noqa: E402
from shared.engine.attention.api import AttentionShape  # noqa: E402
from shared.engine.attention.flashinfer import FlashInferAttention  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from tests.support.engine.attention import Bench, new_layers  # noqa: E402
from tests.support.engine.sequences import Sequences  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402

TOLERANCE = 2e-2
PAGES = 200


@pytest.fixture(params=[(9, 3, 64), (32, 8, 128), (4, 4, 64)], ids=str)
def bench(request: pytest.FixtureRequest) -> Bench:
    query_heads, kv_heads, head_dim = request.param
    shape = AttentionShape(query_heads, kv_heads, head_dim, 16, head_dim**-0.5)
    layers = new_layers(shape, PAGES, torch.bfloat16, "cuda")
    return Bench(FlashInferAttention(shape, layers), shape, PAGES, torch.bfloat16, "cuda")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 300])
def test_whole_prompts(bench: Bench, length: int) -> None:
    assert bench.worst_error([(bench.sequence(length), 0, length)]) < TOLERANCE


def test_chunks_decodes_and_mixed_steps(bench: Bench) -> None:
    old, middle, new = bench.sequence(50), bench.sequence(200), bench.sequence(33)
    bench.run([(old, 0, 49), (middle, 0, 20)])
    assert bench.worst_error([(old, 49, 50), (middle, 20, 199), (new, 0, 32)]) < TOLERANCE
    assert bench.worst_error([(middle, 199, 200), (new, 32, 33)]) < TOLERANCE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = save_tiny(tmp_path_factory.mktemp("model"), head_dim=64)
    config = EngineConfig(str(folder), "bfloat16", kv_bytes=64 << 20, backend="flashinfer")
    engine = load_engine(config, lambda what, fraction: None)
    yield engine
    engine.close()


def test_blocks_that_land_in_shared_memory_are_used(engine: Engine) -> None:
    run = Sequences(engine)
    prompt: list[Any] = [97 + i % 26 for i in range(70)]
    first, landed = run.pages(70), run.pages(70)
    cold = run.prefill(prompt, first)
    run.copy(first[:4], landed[:4])
    assert run.prefill(prompt, landed, start=64).tokens == cold.tokens


def test_a_layer_is_in_shared_memory_when_its_callback_comes(engine: Engine) -> None:
    run = Sequences(engine)
    pages = run.pages(40)
    seen = []
    run.prefill(list(range(40)), pages, on_layer=lambda layer: seen.append(run.content(pages[0], layer)))
    assert seen == [run.content(pages[0], layer) for layer in range(engine.spec.layout.layers)]
    assert all(any(content) for content in seen)
