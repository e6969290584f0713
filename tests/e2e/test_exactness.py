"""The cluster says what the model says, token for token, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.support.ask import Answer, complete, many, stream
from tests.support.engine.prompts import english_ids
from tests.support.engine.reference import greedy, logits_of
from tests.support.processes.launched import Launched, launched

BLOCK = 16
NEW_TOKENS = 12
LENGTHS = (
    1, 15, 16, 17, 31, 32, 33, 47, 48, 49,
    5, 64, 100, 200, 333, 512, 777, 1000, 2000, 3000,
)  # fmt: skip
PROMPTS = [english_ids(n, skip=131 * i + 1) for i, n in enumerate(LENGTHS)]

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    flags = ("--model", "smollm2-135m", "--dtype", "float32")
    with launched(tmp_path_factory.mktemp("exact") / "run", *flags) as running:
        yield running


@pytest_asyncio.fixture
async def client(cluster: Launched) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url) as it:
        yield it


def _reusable(prompt: list[int]) -> int:
    return (len(prompt) - 1) // BLOCK * BLOCK


async def test_cold_then_cached_alone_streamed_and_whole(
    cluster: Launched, client: httpx.AsyncClient, expected: list[list[int]]
) -> None:
    texts: list[str] = []
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        cold = await stream(client, prompt, NEW_TOKENS)
        assert cold.token_ids == tokens, f"cold, {len(prompt)} tokens"
        assert cold.cached_tokens < BLOCK  # other prompts share no first block
        texts.append(cold.text)
    await asyncio.to_thread(cluster.wait_idle)  # all is in the pool: whoever prefills a prompt again finds it
    for prompt, tokens, text in zip(PROMPTS, expected, texts, strict=True):
        warm = await complete(client, prompt, NEW_TOKENS)
        assert warm.token_ids == tokens, f"cached, {len(prompt)} tokens"
        assert warm.cached_tokens == _reusable(prompt)
        assert warm.text == text


async def test_eight_at_once(client: httpx.AsyncClient, expected: list[list[int]]) -> None:
    again = await many(client, [lambda p=p: stream(client, p, NEW_TOKENS) for p in PROMPTS], 8)
    assert [a.token_ids for a in again] == expected
    whole = await many(client, [lambda p=p: complete(client, p, NEW_TOKENS) for p in PROMPTS], 8)
    assert [a.token_ids for a in whole] == expected


async def test_eight_cold_at_once(client: httpx.AsyncClient) -> None:
    prompts = [english_ids(n, skip=5001 + 11 * n) for n in (16, 17, 31, 48, 63, 96, 130, 257)]
    answers = await many(client, [lambda p=p: stream(client, p, NEW_TOKENS) for p in prompts], 8)
    assert [a.token_ids for a in answers] == [greedy(p, NEW_TOKENS) for p in prompts]


async def test_a_seeded_sample_is_the_same_alone_and_among_eight(client: httpx.AsyncClient) -> None:
    options = {"temperature": 0.8, "seed": 1234}
    prompt = english_ids(120, skip=7001)
    alone: Answer = await stream(client, prompt, 40, **options)
    others = [
        lambda i=i: stream(client, english_ids(50 + i, skip=7500 + i), 40, temperature=0.8, seed=i)
        for i in range(7)
    ]
    together = await many(client, [lambda: stream(client, prompt, 40, **options), *others], 8)
    assert together[0].token_ids == alone.token_ids
    other_seed = await stream(client, prompt, 40, temperature=0.8, seed=1235)
    assert other_seed.token_ids != alone.token_ids


async def test_bfloat16_teacher_forced_stays_within_a_logit_margin(tmp_path: Path) -> None:
    """Every token the bf16 cluster chose is, for float32 transformers given the same text, within 0.5 logits of best."""
    with launched(tmp_path / "run", "--model", "smollm2-135m", "--dtype", "bfloat16") as bf16:
        async with httpx.AsyncClient(base_url=bf16.url) as http:
            for length, skip in ((1, 11), (16, 300), (49, 600), (300, 900)):
                prompt = english_ids(length, skip=skip)
                answer = await stream(http, prompt, 16)
                rows = logits_of(prompt + answer.token_ids)[length - 1 : -1]
                for row, token in zip(rows, answer.token_ids, strict=True):
                    assert float(row.max() - row[token]) < 0.5
