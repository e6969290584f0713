"""A node's first time model: a few prefills and decode steps, timed on the engine before it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

from shared.core.costs.model import CostFit, prefill_features, step_features
from shared.core.costs.presets import SMALL_MODEL_CPU
from shared.core.kv.block_keys import blocks_for, pack_tokens
from shared.core.worker.steps import SequenceStep
from shared.engine.api import Engine
from shared.protocol.cluster import CostCoefficients
from shared.protocol.sampling import SamplingParams

BUDGET_S = 1.5
_PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_DECODES = ((1, 16), (4, 16), (8, 16), (1, 256), (4, 256), (8, 256), (16, 256), (4, 1024))
"""(sequences, tokens before the new one in each)."""


def calibrate(
    engine: Engine, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter
) -> CostCoefficients:
    """Time the engine for about `budget_s`, small steps first, none begun that would not fit. The engine must hold
    nothing: any of its pages are overwritten. Where too little could be timed, the prior stands."""
    fit = CostFit(SMALL_MODEL_CPU)
    names = count()
    _timed(engine, _steps(engine, names, 1, 0, _PROMPTS[0]), clock)
    for sizes, share in ((_prefills(), 0.5), (_decodes(), 1.0)):
        deadline = clock() + budget_s * share
        last_s = 0.0
        for sequences, before, tokens in sizes:
            steps = _steps(engine, names, sequences, before, tokens)
            if not steps or clock() + 2.5 * last_s > deadline:
                break
            last_s = _timed(engine, steps, clock)
            if before == 0:
                fit.observe("prefill", prefill_features([(0, tokens)]), last_s)
            else:
                fit.observe("step", step_features(sequences, sequences * (before + 1)), last_s)
    return fit.coefficients


def _prefills() -> Iterator[tuple[int, int, int]]:
    return ((1, 0, tokens) for tokens in _PROMPTS)


def _decodes() -> Iterator[tuple[int, int, int]]:
    return ((sequences, before, 1) for sequences, before in _DECODES)


def _steps(
    engine: Engine, names: Iterator[int], sequences: int, before: int, tokens: int
) -> list[SequenceStep]:
    """So many like sequences; none if the engine's pages or context do not hold them."""
    blocks = blocks_for(before + tokens, engine.spec.layout.block_tokens)
    if blocks * sequences > engine.store.pages or before + tokens > engine.spec.context_tokens:
        return []
    ids = pack_tokens(i % engine.spec.vocab_size for i in range(tokens))
    greedy = SamplingParams(temperature=0.0)
    return [
        SequenceStep(
            f"calibration/{next(names)}",
            before,
            tokens,
            ids,
            tuple(range(i * blocks, (i + 1) * blocks)),
            greedy,
        )
        for i in range(sequences)
    ]


def _timed(engine: Engine, steps: list[SequenceStep], clock: Callable[[], float]) -> float:
    began = clock()
    engine.run(steps)
    return clock() - began
