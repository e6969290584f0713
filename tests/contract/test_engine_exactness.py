"""With the same weights the engine gives, token for token, the output of transformers' generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from msgspec import Struct

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
transformers: Any = pytest.importorskip("transformers")

from shared.core.kv.block_keys import blocks_for  # noqa: E402
from shared.core.worker.steps import SequenceResult  # noqa: E402
from shared.engine.api import Engine, EngineConfig  # noqa: E402
from shared.engine.attention.api import AttentionBatch, Span  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from shared.engine.model import ModelEngine  # noqa: E402
from shared.engine.native.kernels import kernels  # noqa: E402
from shared.protocol.sampling import SamplingParams  # noqa: E402
from tests.support.engine.sequences import GREEDY, Sequences, step  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

THREADS = 1
"""A second thread helps only on an idle machine, and makes everything many times slower on a busy one."""
NEW_TOKENS = 12
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 128, 333, 1000]
QUICK = 64
"""Prompts longer than this are marked slow: together they take minutes. .ci/run includes them."""
BATCHES = [LENGTHS[0:8], LENGTHS[7:15]]


class Prompt(Struct, frozen=True):
    tokens: list[int]
    answer: list[int]
    """The answer of transformers: at most NEW_TOKENS tokens, including an EOS."""


Ask = Callable[[int], Prompt]


class Known(Struct, frozen=True):
    """A prompt whose KV is in the engine's pages."""

    tokens: list[int]
    answer: list[int]
    pages: tuple[int, ...]
    first: SequenceResult


@pytest.fixture(scope="module")
def reference(small_model: Path) -> Any:
    """transformers' own model, in float32."""
    torch.set_num_threads(THREADS)
    return transformers.AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(small_model: Path, reference: Any) -> Ask:
    """Prompt length -> English prompt with the greedy answer of transformers. Each is computed once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_model)
    text = tokenizer(" ".join(topics[name] for name in sorted(topics))[:40_000])["input_ids"]

    @cache
    def ask(length: int) -> Prompt:
        ids = torch.tensor([text[2 * length : 3 * length]])
        assert ids.shape == (1, length)
        mask = torch.ones_like(ids)
        output = reference.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
        return Prompt(ids[0].tolist(), output[0, length:].tolist())

    return ask


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[Engine]:
    config = EngineConfig(str(small_model), "float32", kv_bytes=3 << 29, threads=THREADS)
    engine = load_engine(config, lambda what, fraction: None)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def run(engine: Engine) -> Sequences:
    return Sequences(engine)


@pytest.fixture(scope="module")
def known(run: Sequences, prompts: Ask) -> Any:
    """Prompt length -> the prompt, prefilled once."""

    @cache
    def prefilled(length: int) -> Known:
        prompt = prompts(length)
        pages = run.pages(length + NEW_TOKENS)
        return Known(prompt.tokens, prompt.answer, pages, run.prefill(prompt.tokens, pages))

    return prefilled


def decode(run: Sequences, batch: list[Known]) -> list[list[int]]:
    """Decode prefilled prompts together. Each answer is cut to as many tokens as transformers gave."""
    answers = [list(k.first.tokens) for k in batch]
    for _ in range(NEW_TOKENS - 1):
        steps = [
            step(run.attempt(k.pages), len(k.tokens) + len(answer) - 1, answer[-1:], k.pages)
            for k, answer in zip(batch, answers, strict=True)
        ]
        for answer, result in zip(answers, run.engine.run(steps), strict=True):
            answer.extend(result.tokens)
    return [answer[: len(k.answer)] for k, answer in zip(batch, answers, strict=True)]


def at_length(length: int, *more: int) -> Any:
    return pytest.param(length, *more, marks=[pytest.mark.slow] if length > QUICK else [])


@pytest.mark.parametrize("length", [at_length(n) for n in LENGTHS])
def test_alone(run: Sequences, known: Any, length: int) -> None:
    assert decode(run, [known(length)]) == [known(length).answer]


@pytest.mark.parametrize(
    "lengths", [BATCHES[0], *(pytest.param(b, marks=pytest.mark.slow) for b in BATCHES[1:])], ids=str
)
def test_eight_in_a_batch(run: Sequences, known: Any, lengths: list[int]) -> None:
    batch = [known(length) for length in lengths]
    assert decode(run, batch) == [k.answer for k in batch]


@pytest.mark.parametrize("length", [at_length(n) for n in LENGTHS if n > 16])
def test_with_a_prefix_from_other_pages(run: Sequences, known: Any, length: int) -> None:
    block = run.engine.spec.layout.block_tokens
    cold = known(length)
    blocks = (length - 1) // block
    pages = run.pages(length + NEW_TOKENS)
    run.copy(cold.pages[:blocks], pages[:blocks])
    first = run.prefill(cold.tokens, pages, start=blocks * block)
    assert first.tokens == cold.first.tokens
    assert decode(run, [Known(cold.tokens, cold.answer[:3], pages, first)]) == [cold.answer[:3]]


@pytest.mark.parametrize(
    ("length", "chunk"),
    [
        at_length(length, chunk)
        for length, chunk in [
            (100, 16),
            (200, 17),
            (333, 16),
            (640, 256),
            (1000, 4096),
        ]
    ],
)
def test_in_chunks(run: Sequences, known: Any, length: int, chunk: int) -> None:
    cold = known(length)
    pages = run.pages(length + NEW_TOKENS)
    first = run.prefill(cold.tokens, pages, chunk=chunk)
    assert first.tokens == cold.first.tokens == tuple(cold.answer[:1])
    assert decode(run, [Known(cold.tokens, cold.answer[:3], pages, first)]) == [cold.answer[:3]]


def test_seeded_samples_are_the_same_alone_and_in_a_batch_of_eight(run: Sequences, prompts: Ask) -> None:
    chosen = [prompts(length).tokens for length in LENGTHS[4:12]]
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=900 + i) for i in range(8)]
    together = run.generate(chosen, 8, samples=params)
    alone = [run.generate([p], 8, samples=[s])[0] for p, s in zip(chosen, params, strict=True)]
    assert together == alone
    assert together != [prompts(length).answer[:8] for length in LENGTHS[4:12]]


VARIANTS = {
    "lean, pages of 256": ("cpu", "", 256),
    "lean, portable kernels": ("cpu", "portable", 16),
    "general, portable kernels, pages of 64": ("cpu-general", "portable", 64),
    "torch alone, pages of 256": ("torch", "", 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_path_build_and_page_size(
    small_model: Path, prompts: Ask, variant: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, build, block_tokens = variant
    monkeypatch.setenv("TSUKIMI_KERNELS", build)
    kernels.cache_clear()
    try:
        config = EngineConfig(str(small_model), "float32", block_tokens, 1 << 29, THREADS, backend=backend)
        engine = load_engine(config, lambda what, fraction: None)
    finally:
        kernels.cache_clear()
    run = Sequences(engine)
    for lengths, chunk in (((1, 15, 16, 17, 33, 64), 4096), ((31, 48, 128), 16), ((333, 1000), 100)):
        asked = [prompts(length) for length in lengths]
        answers = run.generate([p.tokens for p in asked], NEW_TOKENS, chunk=chunk)
        said = [answer[: len(p.answer)] for answer, p in zip(answers, asked, strict=True)]
        assert said == [p.answer for p in asked]
        run.reset()
    engine.close()


@pytest.mark.slow
def test_loss_in_bfloat16_is_that_of_float32(small_model: Path, reference: Any) -> None:
    """Teacher-forced on 1,500 tokens of English."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_model)
    text = tokenizer(" ".join(topics[name] for name in sorted(topics))[:20_000])["input_ids"][:1500]
    assert len(text) == 1500
    with torch.inference_mode():
        expected = loss(reference(torch.tensor([text])).logits[0], text)
    config = EngineConfig(str(small_model), "bfloat16", kv_bytes=64 << 20, threads=THREADS)
    engine = load_engine(config, lambda what, fraction: None)
    assert isinstance(engine, ModelEngine)
    pages = tuple(range(blocks_for(len(text), 16)))
    with torch.inference_mode():
        batch = AttentionBatch((Span(0, len(text), pages, 0),))
        logits = engine._forward.logits(
            batch, torch.tensor(text), torch.arange(len(text)), lambda layer: None
        )
    assert abs(loss(logits, text) - expected) < 0.01
    engine.close()


def loss(logits: Any, text: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(text[1:])))


@pytest.mark.slow
def test_bfloat16_teacher_forced_with_a_margin(small_model: Path, reference: Any, prompts: Ask) -> None:
    """Given the float32 text so far, bfloat16 picks the same next token wherever float32 has a clear favourite."""
    margin = 1.0
    config = EngineConfig(str(small_model), "bfloat16", kv_bytes=64 << 20, threads=THREADS)
    engine = load_engine(config, lambda what, fraction: None)
    sure = 0
    for length in (33, 100):
        run = Sequences(engine)
        text = prompts(length).tokens
        with torch.inference_mode():
            best = reference(torch.tensor([text])).logits[0].topk(2, dim=1)
        pages = run.pages(length)
        half = length // 2
        run.prefill(text[:half], pages)
        for at in range(half, length):
            (result,) = engine.run([step(run.attempt(pages), at, text[at : at + 1], pages, GREEDY)])
            if best.values[at, 0] - best.values[at, 1] > margin:
                sure += 1
                assert result.tokens == (int(best.indices[at, 0]),)
        run.reset()
    engine.close()
    assert sure > 20
