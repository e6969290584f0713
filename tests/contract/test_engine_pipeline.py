"""A group of stages computes what one process computes, to the bit, in tokens and in pages; and fails as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.api import Engine, EngineConfig, EngineLost  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from shared.engine.native.kernels import kernels  # noqa: E402
from shared.protocol.errors import Invalid  # noqa: E402
from shared.protocol.sampling import SamplingParams  # noqa: E402
from tests.support.sequences import GREEDY, Sequences, step  # noqa: E402
from tests.support.tiny import save_tiny  # noqa: E402
from tests.support.until import until  # noqa: E402

MB = 1 << 20
PIECE = 128

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(kernels() is None, reason="the kernels cannot be built here"),
]


def load(model: str | Path, stages: int, kv_bytes: int = 4 * MB, backend: str = "cpu") -> Engine:
    config = EngineConfig(
        str(model),
        "float32",
        kv_bytes=kv_bytes,
        threads=1,
        stages=stages,
        piece_tokens=PIECE,
        backend=backend,
    )
    return load_engine(config, lambda what, fraction: None)


def text(length: int, seed: int = 0) -> list[int]:
    return [300 + (i * 37 + i * i * 11 + seed * 101) % 40_000 for i in range(length)]


def children() -> list[psutil.Process]:
    """The stages that this process has started and that live."""
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "shared.engine.pipeline.stage" in p.cmdline()]


# -- the real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(small_model: Path) -> Iterator[Engine]:
    engine = load(small_model, 1, 320 * MB)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest, small_model: Path) -> Iterator[Engine]:
    engine = load(small_model, request.param, 320 * MB)
    assert len(children()) == request.param - 1
    yield engine
    engine.close()
    assert not children()


class Pair:
    """The same work on both, in the same pages."""

    def __init__(self, plain: Engine, group: Engine) -> None:
        self.both = Sequences(plain), Sequences(group)
        self.pages: list[int] = []

    def take(self, tokens: int) -> tuple[int, ...]:
        plain, group = (run.pages(tokens) for run in self.both)
        assert plain == group
        self.pages += plain
        for run in self.both:  # of what an earlier test left there
            layout = run.engine.spec.layout
            for page in plain:
                for layer in range(layout.layers):
                    run.engine.store.slice(page, layer)[:] = bytes(layout.slice_bytes)
        return plain

    def check_pages(self) -> None:
        layers = self.both[0].engine.spec.layout.layers
        for page in self.pages:
            for layer in range(layers):
                plain, group = (run.content(page, layer) for run in self.both)
                assert plain == group, f"page {page}, layer {layer}"


@pytest.fixture
def pair(plain: Engine, group: Engine) -> Pair:
    assert plain.spec == group.spec
    return Pair(plain, group)


@pytest.mark.real
@pytest.mark.parametrize("length", [1, 17, 300, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_prompt_and_its_answer(pair: Pair, length: int) -> None:
    pages = pair.take(length + 3)
    scores = SamplingParams(temperature=0.0, top_logprobs=5)
    said = []
    for run in pair.both:
        layers: list[int] = []
        first = run.prefill(text(length), pages, sample=scores, on_layer=layers.append)
        assert layers == list(range(run.engine.spec.layout.layers))
        (second,) = run.engine.run([step(run.attempt(pages), length, first.tokens, pages, scores)])
        said.append((first.tokens, first.logprobs, second.tokens, second.logprobs))
    assert said[0] == said[1]
    pair.check_pages()


@pytest.mark.real
def test_behind_a_cached_prefix_in_chunks(pair: Pair) -> None:
    pages = pair.take(400)
    prompt = text(390, seed=2)
    said = []
    for run in pair.both:
        run.prefill(prompt[:96], pages, sample=GREEDY)
        said.append(run.prefill(prompt, pages, start=96, chunk=200).tokens)
    assert said[0] == said[1]
    pair.check_pages()


@pytest.mark.real
def test_several_prompts_and_a_decoding_sequence_in_a_step_seeded(pair: Pair) -> None:
    lengths = (5, 150, 33, 280)
    tables = [pair.take(length + 2) for length in lengths]
    old = pair.take(60)
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=50 + i) for i in range(5)]
    said = []
    for run in pair.both:
        run.prefill(text(50, seed=9), old)
        batch = [
            step(run.attempt(pages), 0, text(length, seed=i), pages, params[i] if i != 1 else None)
            for i, (length, pages) in enumerate(zip(lengths, tables, strict=True))
        ]
        batch.insert(2, step(run.attempt(old), 50, [77], old, params[4]))
        results = run.engine.run(batch)
        assert [len(r.tokens) for r in results] == [1, 0, 1, 1, 1]
        said.append([r.tokens for r in results])
    assert said[0] == said[1]
    pair.check_pages()


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def tokens(length: int) -> list[int]:
    return [7 + i % 200 for i in range(length)]


def test_a_step_whose_layers_nobody_wants_to_hear_of_is_void_and_the_next_one_is_right(tiny: Path) -> None:
    engine = load(tiny, 3)
    run = Sequences(engine)
    expected = run.prefill(tokens(600), run.pages(600)).tokens
    for bad_layer in (0, 1, 2):

        def on_layer(layer: int, bad_layer: int = bad_layer) -> None:
            if layer == bad_layer:
                raise OSError("nobody listens")

        pages = run.pages(600)
        with pytest.raises(OSError, match="nobody listens"):
            run.prefill(tokens(600), pages, on_layer=on_layer)
        layers: list[int] = []
        assert run.prefill(tokens(600), pages, on_layer=layers.append).tokens == expected
        assert layers == [0, 1, 2]
    assert engine.fault() == ""
    engine.close()


async def test_when_a_stage_is_killed_the_engine_says_so_and_the_other_stages_end(tiny: Path) -> None:
    engine = load(tiny, 3)
    run = Sequences(engine)
    run.prefill(tokens(50), run.pages(50))
    first, second = children()
    os.kill(second.pid, signal.SIGKILL)
    await until(lambda: bool(engine.fault()), 10)
    assert "stage 2" in engine.fault() or "stage 1" in engine.fault()
    with pytest.raises(EngineLost):
        run.prefill(tokens(300), run.pages(300))
    engine.close()
    assert not first.is_running()
    assert not children()


def test_a_stage_killed_in_the_middle_of_a_step_ends_the_step(tiny: Path) -> None:
    engine = load(tiny, 2)
    run = Sequences(engine)

    def on_layer(layer: int) -> None:
        for child in children():
            child.kill()

    def prefill_twice() -> None:  # the stage may have been done with the first one
        for _ in range(2):
            run.prefill(tokens(1000), run.pages(1000), on_layer=on_layer)

    with pytest.raises(EngineLost):
        prefill_twice()
    engine.close()
    assert not children()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_node_is_not_the_stages(tiny: Path, signum: int) -> None:
    engine = load(tiny, 2)
    os.kill(children()[0].pid, signum)
    run = Sequences(engine)
    assert run.prefill(tokens(50), run.pages(50)).tokens
    engine.close()
    assert not children()


@pytest.mark.parametrize(
    ("model", "backend", "stages", "reason"),
    [
        ("toy", "auto", 2, "toy"),
        ("tiny", "torch", 2, "lean path"),
        ("tiny", "cpu-general", 2, "lean path"),
        ("tiny", "cpu", 4, "3 layers"),
        ("gpt2", "cpu", 2, "gpt2 model"),
    ],
)
def test_what_has_no_stages_is_refused(
    tiny: Path, tmp_path: Path, model: str, backend: str, stages: int, reason: str
) -> None:
    folder = {"toy": "toy", "tiny": tiny}.get(model) or save_tiny(tmp_path, "GPT2", n_positions=512, n_head=4)
    with pytest.raises(Invalid, match=reason) as refused:
        load(folder, stages, backend=backend)
    assert refused.value.param == "stages"
    assert not children()
