"""How long the cluster's work takes with nothing beside it, and how much engines that run side by side slow each other.

The nodes' own time models are means over what they ran, contention included. The simulator brings its own contention, so
it needs the times of undisturbed work. They are measured from outside, with requests of new tokens, one at a time.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shared.protocol.cluster import CostCoefficients
from tsukimi.traffic.asking import Sample, ask
from tsukimi.traffic.settings import Load
from tsukimi.traffic.trace_load import http_to

LENGTHS = (128, 256, 512, 1024)
ROUNDS = 3
ANSWER_TOKENS = 12
ABREAST_TOKENS = 512
ABREAST = 8
"""Prompts of the measurement side by side."""


class Undisturbed(Struct, frozen=True):
    cost: CostCoefficients
    cores: float
    """How many engines run at full speed side by side; 0: only one prefill node, so it can't be measured."""


async def calibrate(
    url: str,
    api_key: str,
    load: Load,
    ids: Sequence[int],
    fitted: CostCoefficients,
    *,
    context_tokens: int,
    prefills: int,
) -> Undisturbed:
    """Takes a minute or so. `fitted`: the nodes' own model, for what is not measured here: how much a further sequence
    lengthens a step."""
    draw = random.SystemRandom()
    lengths = [n for n in LENGTHS if n + ANSWER_TOKENS <= context_tokens] or [context_tokens // 2]
    async with http_to(url, api_key) as http:

        async def one(tokens: int, answer: int) -> Sample:
            began = time.perf_counter()
            prompt = draw.choices(ids, k=tokens)
            return await ask(http, load, prompt, 0, 0.0, began, answer)

        await one(lengths[0], ANSWER_TOKENS)
        lone = [(n, await one(n, ANSWER_TOKENS)) for _ in range(ROUNDS) for n in lengths]
        cost = _fit([(n, s) for n, s in lone if not s.reason], fitted)
        cores = 0.0
        if prefills > 1:
            tokens = min(ABREAST_TOKENS, lengths[-1])
            alone = await _prefill_s(one, tokens, 1, ABREAST // 2)
            abreast = await _prefill_s(one, tokens, 2, ABREAST)
            cores = min(float(os.cpu_count() or 1), max(1.0, 2.0 * alone / abreast))
    return Undisturbed(cost, cores)


async def _prefill_s(
    one: Callable[[int, int], Awaitable[Sample]], tokens: int, clients: int, prompts: int
) -> float:
    """Mean time of a prompt while so many clients ask at once."""
    left = iter(range(prompts))
    took: list[float] = []

    async def client() -> None:
        for _ in left:
            took.append((await one(tokens, 1)).seconds)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return statistics.median(took)


def _fit(lone: Sequence[tuple[int, Sample]], fitted: CostCoefficients) -> CostCoefficients:
    """Least squares over relative errors. No term is negative."""
    by_length: dict[int, list[Sample]] = {}
    for n, sample in lone:
        if sample.ttft_s is not None:
            by_length.setdefault(n, []).append(sample)
    lengths = sorted(by_length)
    ttft = np.array([statistics.median([s.ttft_s or 0.0 for s in by_length[n]]) for n in lengths])
    features = np.array([(1.0, n, n * n) for n in lengths])
    terms = _least_squares(features, ttft)
    gaps = [statistics.median([g for s in by_length[n] for g in s.gaps_s[1:]] or [0.0]) for n in lengths]
    steps = _least_squares(
        np.array([(1.0, n) for n in lengths]),
        np.array([max(1e-6, g - fitted.step_request_s) for g in gaps]),
    )
    return replace(
        fitted,
        prefill_fixed_s=terms[0],
        prefill_token_s=terms[1],
        prefill_square_s=terms[2],
        step_fixed_s=steps[0],
        step_token_s=steps[1],
    )


def _least_squares(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Leaves out whichever term would be negative."""
    weights = 1.0 / seconds
    kept = list(range(features.shape[1]))
    while kept:
        scaled = features[:, kept] * weights[:, None]
        terms = np.linalg.lstsq(scaled, seconds * weights, rcond=None)[0]
        if (terms >= 0.0).all():
            found = dict(zip(kept, terms.tolist(), strict=True))
            return [float(found.get(i, 0.0)) for i in range(features.shape[1])]
        kept.pop(int(terms.argmin()))
    return [0.0] * features.shape[1]
