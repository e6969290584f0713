"""A group of stages gives the same tokens and page contents as one process, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.api import Engine  # noqa: E402
from shared.engine.native.kernels import kernels  # noqa: E402
from shared.protocol.sampling import SamplingParams  # noqa: E402
from tests.support.engine.sequences import GREEDY, Sequences, step  # noqa: E402
from tests.support.processes.stages import MB, children, load  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(kernels() is None, reason="the kernels cannot be built here"),
]


def text(length: int, seed: int = 0) -> list[int]:
    return [300 + (i * 37 + i * i * 11 + seed * 101) % 40_000 for i in range(length)]


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
    """Does the same work on both engines, in the same pages."""

    def __init__(self, plain: Engine, group: Engine) -> None:
        self.both = Sequences(plain), Sequences(group)
        self.pages: list[int] = []

    def take(self, tokens: int) -> tuple[int, ...]:
        plain, group = (run.pages(tokens) for run in self.both)
        assert plain == group
        self.pages += plain
        for run in self.both:  # clear what an earlier test left in these pages
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
@pytest.mark.parametrize("length", [1, 17, 300, 1000])
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
