"""How the next token is drawn, and what a drawn token carries."""

from __future__ import annotations

from msgspec import Struct


class SamplingParams(Struct, frozen=True):
    """Resolved by the gateway: every field is valid for the model, and the seed is always set.

    Draws are counter-based: the uniform for the token at absolute position p is a function of (seed, p) alone, so
    batch neighbours, node and failover never change it.
    """

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    seed: int = 0
    """Unsigned 64-bit."""
    top_logprobs: int | None = None
    """None: no logprobs; k: the sampled token's and the k likeliest tokens' logprobs."""
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class TokenLogprob(Struct, frozen=True, array_like=True):
    logprob: float
    """Of the sampled token, under the unmodified distribution (temperature 1)."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""
