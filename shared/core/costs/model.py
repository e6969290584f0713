"""How long things take: closed-form time models and their online fit.

    prefill_s(n, p) = fixed + token*(n-p) + square*(n^2-p^2) + load*p     n prompt tokens, p of them cached
    step_s(b, K)    = fixed + request*b + token*K                         b sequences attending to K tokens

Pure arithmetic over protocol.cluster.CostCoefficients. Nothing here knows what a node is; measurements come
in as (kind, features, seconds) and coefficients go out, announced by the node that took them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from shared.core.costs.fit import LinearFit
from shared.protocol.cluster import CostCoefficients

Kind = Literal["prefill", "step", "load", "pull"]
"""load: fetching blocks from the own host; pull: from another one."""


# -- formulas ----------------------------------------------------------------------------------------------


def compute_s(cost: CostCoefficients, start: int, tokens: int) -> float:
    """One prefill step over positions start .. start+tokens-1, everything before them already in memory."""
    square = (start + tokens) ** 2 - start**2
    return cost.prefill_fixed_s + cost.prefill_token_s * tokens + cost.prefill_square_s * square


def load_s(cost: CostCoefficients, tokens: int) -> float:
    """Loading the cached KV of `tokens` tokens."""
    return cost.load_token_s * tokens


def prefill_s(cost: CostCoefficients, prompt_tokens: int, cached_tokens: int = 0) -> float:
    """A whole prompt, its cached prefix loaded first."""
    square = prompt_tokens**2 - cached_tokens**2
    computed = cost.prefill_token_s * (prompt_tokens - cached_tokens) + cost.prefill_square_s * square
    return cost.load_token_s * cached_tokens + (cost.prefill_fixed_s + computed)


def step_s(cost: CostCoefficients, requests: int, kv_tokens: int) -> float:
    """One decode step."""
    return cost.step_fixed_s + cost.step_request_s * requests + cost.step_token_s * kv_tokens


def mixed_s(
    cost: CostCoefficients, chunks: Iterable[tuple[int, int]], requests: int = 0, kv_tokens: int = 0
) -> float:
    """One step over prefill chunks (start, tokens) and `requests` decoding sequences."""
    chunked = 0.0
    for start, tokens in chunks:
        square = (start + tokens) ** 2 - start**2
        chunked += cost.prefill_token_s * tokens + cost.prefill_square_s * square
    fixed = max(cost.prefill_fixed_s, cost.step_fixed_s if requests else 0.0)
    return fixed + chunked + cost.step_request_s * requests + cost.step_token_s * kv_tokens


def repeat_s(cost: CostCoefficients, requests: int, kv_tokens: int, steps: int) -> float:
    """`steps` decode steps in a row; each adds one token per sequence. kv_tokens counts the first step's."""
    grown = requests * (steps * (steps - 1) // 2)
    return steps * step_s(cost, requests, kv_tokens) + cost.step_token_s * grown


def steps_within(cost: CostCoefficients, requests: int, kv_tokens: int, seconds: float) -> int:
    """How many consecutive decode steps (see repeat_s) fit into `seconds`."""
    first, growth = step_s(cost, requests, kv_tokens), cost.step_token_s * requests
    if first <= 0.0:
        raise ValueError("a decode step must take time")
    guess = seconds / first
    if growth > 0.0:
        linear = first - growth / 2
        guess = (math.sqrt(linear * linear + 2 * growth * max(seconds, 0.0)) - linear) / growth
    steps = max(0, int(guess))
    while repeat_s(cost, requests, kv_tokens, steps + 1) <= seconds:
        steps += 1
    while steps and repeat_s(cost, requests, kv_tokens, steps) > seconds:
        steps -= 1
    return steps


def transfer_s(size_bytes: float, bandwidth_bytes_s: float, fixed_s: float = 0.0) -> float:
    """Moving bytes over an otherwise idle link. Moving 0 bytes takes 0 s."""
    return fixed_s + size_bytes / bandwidth_bytes_s if size_bytes > 0 else 0.0


# -- measurements ------------------------------------------------------------------------------------------


def prefill_features(chunks: Iterable[tuple[int, int]]) -> tuple[float, float, float]:
    """Features of a step over prefill chunks (start, tokens) only."""
    tokens = square = 0
    for start, n in chunks:
        tokens += n
        square += (start + n) ** 2 - start**2
    return 1.0, float(tokens), float(square)


def step_features(requests: int, kv_tokens: int) -> tuple[float, float, float]:
    """Features of one pure decode step."""
    return 1.0, float(requests), float(kv_tokens)


def load_features(tokens: int) -> tuple[float]:
    """Features of one prefix load."""
    return (float(tokens),)


class CostFit:
    """A node's coefficients, learnt from its own steps.

    Starts from a prior, needs a few samples of a kind before it moves, recovers from a prior that is wrong by any factor,
    finds the mean where other work slows the node down now and then, and is barely affected by single stalls
    (core.costs.fit). Deterministic; `observe` is O(1).
    """

    def __init__(self, prior: CostCoefficients) -> None:
        self._fits: dict[Kind, LinearFit] = {
            "prefill": LinearFit((prior.prefill_fixed_s, prior.prefill_token_s, prior.prefill_square_s)),
            "step": LinearFit((prior.step_fixed_s, prior.step_request_s, prior.step_token_s)),
            "load": LinearFit((prior.load_token_s,)),
            "pull": LinearFit((prior.load_token_s,)),
        }

    def observe(self, kind: Kind, features: tuple[float, ...], seconds: float) -> None:
        """Take one measurement. Impossible ones (no time, no work) are ignored."""
        self._fits[kind].observe(features, seconds)

    def observe_mixed(
        self, chunks: Sequence[tuple[int, int]], requests: int, kv_tokens: int, seconds: float
    ) -> None:
        """A step over prefill chunks (start, tokens) beside `requests` decoding sequences. Both models take their part of
        it, in proportion to what they predict."""
        cost = self.coefficients
        predicted_s = mixed_s(cost, chunks, requests, kv_tokens)
        if predicted_s <= 0.0:
            return
        ratio = seconds / predicted_s
        self.observe("prefill", prefill_features(chunks), ratio * mixed_s(cost, chunks))
        self.observe("step", step_features(requests, kv_tokens), ratio * step_s(cost, requests, kv_tokens))

    def samples(self, kind: Kind) -> int:
        """How many measurements of a kind have been taken."""
        return self._fits[kind].samples

    @property
    def pull_token_s(self) -> float:
        """Seconds per token that is pulled from another host. Not in `coefficients`: to others it is the link's."""
        return self._fits["pull"].weights()[0]

    @property
    def coefficients(self) -> CostCoefficients:
        prefill, step, load = (self._fits[kind].weights() for kind in ("prefill", "step", "load"))
        return CostCoefficients(*prefill, *load, *step)
