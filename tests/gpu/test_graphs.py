"""Decode steps as CUDA graphs: the logits and tokens of steps launched kernel by kernel, whatever is replayed.

Both split the keys of long sequences among thread blocks differently, so they agree up to rounding: less in float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")


from shared.engine.api import Engine, EngineConfig  # noqa: E402
from shared.engine.graphs.capture import CudaCapture  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from tests.support.engine.sequences import Sequences  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402
from tests.support.engine.twins import GARBAGE, Twins, worst  # noqa: E402

TOLERANCE = 2e-2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "tensor cores": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "Mistral": ("Mistral", {"sliding_window": 40}),
    "Gemma2": ("Gemma2", {"sliding_window": 40, "query_pre_attn_scalar": 64}),
}


def twins_of(folder: Path, kind: str, **config: Any) -> Twins:
    from shared.engine.attention.flashinfer import FlashInferAttention

    return Twins(
        save_tiny(folder, kind, head_dim=64, **config),
        CudaCapture,
        FlashInferAttention,
        most=8,
        pages=300,
        block=16,
        device="cuda",
        dtype=torch.float16,
    )


@pytest.fixture(scope="module", params=list(MODELS))
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    kind, config = MODELS[request.param]
    twins = twins_of(tmp_path_factory.mktemp("model"), kind, **config)
    assert twins.graphed.captured == (1, 2, 4, 8)
    return twins


@pytest.fixture
def twins(captured: Twins) -> Twins:
    captured.spoil()
    return captured


def assert_same(pair: tuple[Any, Any]) -> None:
    """Logits up to rounding, and the likeliest tokens the same where one is clearly the likeliest."""
    assert worst(pair) < TOLERANCE
    graphed, plain = (logits.float() for logits in pair)
    first, second = plain.topk(2).values.unbind(-1)
    clear = first - second > 2 * TOLERANCE * plain.abs().max()
    assert torch.equal(graphed.argmax(-1)[clear], plain.argmax(-1)[clear])


def test_capturing_writes_only_the_scrap_page(captured: Twins) -> None:
    for layer in captured.as_captured:
        assert bool((layer[: captured.pages] == GARBAGE).all())


def test_sequences_that_grow_over_page_boundaries_in_batches_that_change(twins: Twins) -> None:
    tables = [tuple(range(i, 300, 6)) for i in range(6)]
    lengths = [14, 1, 31, 16, 250, 700]
    assert_same(twins.run([(0, n, t) for n, t in zip(lengths, tables, strict=True)]))
    batches = [[0, 1, 2, 3, 4, 5], [0], [5], [5, 4], [3, 0, 2], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    for batch in batches * 3:
        assert_same(twins.run([(lengths[i], lengths[i] + 1, tables[i]) for i in batch]))
        for i in batch:
            lengths[i] += 1
    assert lengths[0] > 16
    assert twins.same_pages(3e-2)


def test_padding_writes_only_the_scrap_page(twins: Twins) -> None:
    twins.run([(0, 1, (5,)), (0, 1, (9,)), (0, 1, (2,))])
    assert twins.touched() == [{5, 9, 2}] * len(twins.layers)


def test_steps_between_replays_may_be_anything(twins: Twins) -> None:
    tables = [tuple(range(20 * i, 20 * i + 20)) for i in range(9)]
    assert_same(twins.run([(0, 17, table) for table in tables]))
    assert_same(twins.run([(17, 18, table) for table in tables]))
    assert_same(twins.run([(18, 19, table) for table in tables[:7]]))
    assert_same(twins.run([(18, 30, tables[7]), (19, 20, tables[0])]))
    assert_same(twins.run([(20, 21, tables[0])]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model"), head_dim=64))


def engine_with(folder: str, graph_rows: int) -> Engine:
    config = EngineConfig(
        folder,
        "float16",
        kv_bytes=64 << 20,
        backend="flashinfer",
        graph_rows=graph_rows,
        staging_bytes=4 << 20,
    )
    return load_engine(config, lambda what, fraction: None)


@pytest.fixture(scope="module")
def engines(folder: str) -> Iterator[tuple[Engine, Engine]]:
    both = engine_with(folder, 8), engine_with(folder, 0)
    assert both[0]._forward.captured == (1, 2, 4, 8)  # type: ignore[attr-defined]
    yield both
    for engine in both:
        engine.close()


def test_an_engine_says_the_same_with_and_without(engines: tuple[Engine, Engine]) -> None:
    prompts = [[97 + (i * 7 + n) % 26 for i in range(n)] for n in (3, 15, 16, 17, 40)]
    with_graphs, without = (Sequences(engine).generate(prompts, 40) for engine in engines)
    assert with_graphs == without
