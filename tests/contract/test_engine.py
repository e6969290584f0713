"""What every engine guarantees, tested on the toy engine and on a small model with each way to store its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.core.worker.steps import SequenceStep
from shared.engine.api import Engine, EngineConfig
from shared.engine.load import load_engine
from shared.protocol.sampling import SamplingParams
from tests.support.engine.sequences import GREEDY, Sequences, step

MB = 1 << 20


def _quiet(what: str, fraction: float) -> None:
    pass


def _toy(folder: Path) -> Engine:
    return load_engine(EngineConfig("toy", kv_bytes=4 * MB), _quiet)


def _tiny(folder: Path, backend: str = "cpu") -> Engine:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tests.support.engine.tiny import save_tiny

    model = str(save_tiny(folder))
    return load_engine(EngineConfig(model, "float32", kv_bytes=32 * MB, threads=1, backend=backend), _quiet)


def _staged(folder: Path) -> Engine:
    """Two processes, one with two layers and one with one; pieces of 32 tokens."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from shared.engine.native.kernels import kernels
    from tests.support.engine.tiny import save_tiny

    if kernels() is None:
        pytest.skip("the kernels cannot be built here")
    config = EngineConfig(
        str(save_tiny(folder)), "float32", kv_bytes=32 * MB, threads=1, stages=2, piece_tokens=32
    )
    return load_engine(config, _quiet)


def _reference(folder: Path) -> Engine:
    return _tiny(folder, "reference")


def _mirrored(folder: Path) -> Engine:
    """A model whose pages are on a device apart from the shared memory, as with a GPU. Here both are on the CPU."""
    torch = pytest.importorskip("torch", reason="the engine extra is not installed")
    from shared.engine.attention.cpu import CpuAttention
    from shared.engine.hardware import Hardware
    from shared.engine.model import ModelEngine
    from tests.support.engine.tiny import save_tiny

    config = EngineConfig(str(save_tiny(folder)), kv_bytes=32 * MB, threads=1)
    return ModelEngine.load(
        config, _quiet, Hardware(torch.device("cpu"), "float32", CpuAttention, mirrored=True)
    )


def _captured(folder: Path) -> Engine:
    """As mirrored, with decode steps of up to six sequences captured: replayed as recorded, like CUDA graphs."""
    torch = pytest.importorskip("torch", reason="the engine extra is not installed")
    from shared.engine.hardware import Hardware
    from shared.engine.model import ModelEngine
    from tests.support.engine.fixed_attention import FixableCpu
    from tests.support.engine.recorded import Recorder
    from tests.support.engine.tiny import save_tiny

    model = str(save_tiny(folder, max_position_embeddings=512))
    config = EngineConfig(model, kv_bytes=32 * MB, threads=1, graph_rows=6)
    hardware = Hardware(torch.device("cpu"), "float32", FixableCpu, mirrored=True, capture=Recorder)
    engine = ModelEngine.load(config, _quiet, hardware)
    assert engine._forward.captured == (1, 2, 4, 6)  # type: ignore[attr-defined]
    return engine


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "toy": _toy,
    "cpu": _tiny,
    "stages": _staged,
    "reference": _reference,
    "mirrored": _mirrored,
    "captured": _captured,
}


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = ENGINES[request.param](tmp_path_factory.mktemp("model"))
    yield engine
    engine.close()


@pytest.fixture
def run(engine: Engine) -> Sequences:
    return Sequences(engine)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Plain text-like token ids that every engine's vocabulary has."""
    return [97 + (i * 7 + i * i * 3 + seed * 11) % 26 for i in range(length)]


LENGTHS = sorted({k * 16 + d for k in (1, 2, 3) for d in (-1, 0, 1)} | {1, 2, 100})


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_change_nothing(run: Sequences, length: int) -> None:
    whole = run.generate([prompt(length)], 4)
    for chunk in (1, 7, 16, 17):
        assert run.generate([prompt(length)], 4, chunk=chunk) == whole


def test_a_batch_says_what_each_says_alone(run: Sequences) -> None:
    prompts = [prompt(n, seed=n) for n in (1, 15, 16, 17, 40, 3, 64, 33)]
    alone = [run.generate([p], 12)[0] for p in prompts]
    assert run.generate(prompts, 12) == alone


def test_seeded_samples_are_the_same_alone_and_in_a_batch(run: Sequences) -> None:
    prompts = [prompt(20, seed=i) for i in range(8)]
    params = [SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1000 + i) for i in range(8)]
    alone = [run.generate([p], 16, samples=[s])[0] for p, s in zip(prompts, params, strict=True)]
    assert run.generate(prompts, 16, samples=params) == alone
    other = run.generate(prompts, 16, samples=[SamplingParams(temperature=0.8, seed=i) for i in range(8)])
    assert other != alone, "another seed should give another text"


def test_sampling_that_looks_back_is_the_same_alone_and_in_a_batch(run: Sequences) -> None:
    prompts = [prompt(20, seed=i) for i in range(7)]
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, frequency_penalty=0.3),
        SamplingParams(temperature=0.8, seed=3, logit_bias=((97, 3.0), (98, -100.0)), min_p=0.05),
        SamplingParams(temperature=0.0, logit_bias=((120, 100.0),)),
        SamplingParams(temperature=0.9, seed=5, eos_token_ids=(257, 101), min_tokens=16),
        SamplingParams(temperature=0.8, seed=6),
    ]
    alone = [run.generate([p], 16, samples=[s])[0] for p, s in zip(prompts, params, strict=True)]
    assert run.generate(prompts, 16, samples=params) == alone
    assert 98 not in alone[3]
    assert set(alone[4]) == {120}
    assert not {257, 101} & set(alone[5])


def test_a_sequence_with_bad_sampling_fails_alone(run: Sequences) -> None:
    pages = run.pages(20), run.pages(20)
    bad = SamplingParams(temperature=0.0, logit_bias=((1 << 20, 1.0),))
    good = SamplingParams(temperature=0.0)
    first, second = run.engine.run(
        [step("bad", 0, prompt(20), pages[0], bad), step("good", 0, prompt(20), pages[1], good)]
    )
    assert "logit_bias" in first.error
    assert second.tokens == run.prefill(prompt(20), run.pages(20)).tokens


def test_a_prefix_from_other_pages_gives_the_same_answer(run: Sequences) -> None:
    block = run.engine.spec.layout.block_tokens
    for length in (block + 1, 2 * block, 2 * block + 1, 3 * block - 1, 100):
        text = prompt(length, seed=length)
        first = run.pages(length)
        cold = run.prefill(text, first)
        blocks = (length - 1) // block
        landed = run.pages(length)
        run.copy(first[:blocks], landed[:blocks])
        assert run.prefill(text, landed, start=blocks * block).tokens == cold.tokens


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_full_hit_computes_the_last_token_again(run: Sequences, k: int) -> None:
    length = k * run.engine.spec.layout.block_tokens
    pages = run.pages(length)
    cold = run.prefill(prompt(length), pages)
    assert run.prefill(prompt(length), pages, start=length - 1) == cold


def test_rows_behind_a_sequence_do_not_count(run: Sequences) -> None:
    text = prompt(21)
    clean, dirty = run.pages(48), run.pages(48)
    for page in dirty:
        for layer in range(run.engine.spec.layout.layers):
            run.engine.store.slice(page, layer)[:] = b"\x3c" * run.engine.spec.layout.slice_bytes
    assert run.prefill(text, dirty).tokens == run.prefill(text, clean).tokens


def test_a_layer_is_in_the_pages_when_its_callback_comes(run: Sequences) -> None:
    layers = run.engine.spec.layout.layers
    pages = run.pages(40)
    seen: list[tuple[int, list[bytes]]] = []
    untouched: list[bool] = []
    before = [run.content(pages[0], layer) for layer in range(layers)]

    def on_layer(layer: int) -> None:
        seen.append((layer, [run.content(page, layer) for page in pages]))
        if layer + 1 < layers:
            untouched.append(run.content(pages[0], layer + 1) == before[layer + 1])

    run.prefill(prompt(40), pages, on_layer=on_layer)
    assert [layer for layer, _ in seen] == list(range(layers))
    assert all(untouched), "a layer was written before the one below had been announced"
    for layer, content in seen:
        assert content == [run.content(page, layer) for page in pages]


def test_a_step_whose_layers_nobody_wants_to_hear_of_is_void_and_the_next_one_is_right(
    run: Sequences,
) -> None:
    def on_layer(layer: int) -> None:
        raise OSError("nobody listens")

    expected = run.prefill(prompt(40), run.pages(40)).tokens
    pages = run.pages(40)
    with pytest.raises(OSError, match="nobody listens"):
        run.prefill(prompt(40), pages, on_layer=on_layer)
    assert run.prefill(prompt(40), pages).tokens == expected


def test_prefill_and_decode_share_a_step(run: Sequences) -> None:
    old, new = prompt(30, seed=1), prompt(50, seed=2)
    old_pages, new_pages = run.pages(40), run.pages(60)
    (first,) = run.prefill(old, old_pages).tokens
    (second,) = run.engine.run([step("old", 30, [first], old_pages)])[0].tokens
    expected = run.prefill(new, run.pages(60)).tokens
    mixed = run.engine.run([step("old", 30, [first], old_pages), step("new", 0, new, new_pages)])
    assert [r.attempt for r in mixed] == ["old", "new"]
    assert [r.tokens for r in mixed] == [(second,), expected]


def test_without_sampling_there_is_no_token(run: Sequences) -> None:
    (result,) = run.engine.run([step("a", 0, prompt(5), run.pages(5), None)])
    assert result.tokens == ()
    assert result.error == ""


def test_logprobs_come_when_asked_for(run: Sequences) -> None:
    pages = run.pages(20)
    plain = run.prefill(prompt(20), pages)
    with_top = run.prefill(prompt(20), pages, sample=SamplingParams(temperature=0.0, top_logprobs=3))
    bare = run.prefill(prompt(20), pages, sample=SamplingParams(temperature=0.0, top_logprobs=0))
    assert plain.logprobs == ()
    assert plain.tokens == with_top.tokens == bare.tokens
    (logprob,) = with_top.logprobs
    assert logprob.top[0] == (with_top.tokens[0], logprob.logprob)
    assert [p for _, p in logprob.top] == sorted((p for _, p in logprob.top), reverse=True)
    assert len(logprob.top) == 3
    assert bare.logprobs[0].top == ()


def test_a_bad_sequence_fails_alone(run: Sequences) -> None:
    good = [step("a", 0, prompt(10, 1), run.pages(10)), step("c", 0, prompt(12, 2), run.pages(12))]
    expected = run.engine.run(good)
    bad: list[SequenceStep] = [
        step("b", 0, [run.engine.spec.vocab_size], run.pages(1)),
        SequenceStep("b", 0, 3, b"\x61\0\0\0", run.pages(3), GREEDY),
        step("b", run.engine.spec.context_tokens, [97], run.pages(1)),
    ]
    for sequence in bad:
        first, failed, last = run.engine.run([good[0], sequence, good[1]])
        assert failed.error
        assert failed.tokens == ()
        assert [first, last] == expected
