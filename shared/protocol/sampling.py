"""How the next token is drawn, and what a drawn token carries."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

BIAS_MOST = 100.0
"""Largest logit_bias, either way: it bans a token, or leaves nothing but its like."""
TOP_LOGPROBS_MOST = 20
"""Most likeliest tokens that are told with a drawn one."""
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


NO_TOKEN = "no token is allowed"
"""What an engine says in place of a token if bias, grammar and length together leave none: the request's own doing."""
NO_GRAMMAR = "grammar: "
"""How an engine begins to say that a grammar can't be followed: the request's own doing as well."""


class Grammar(Struct, frozen=True):
    """What an answer must look like, as a whole."""

    kind: GrammarKind
    text: str = ""
    """JSON of the schema, the expression, JSON of the list of choices, Lark or GBNF; nothing for `json_object`."""


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
    """Tokens that end the answer: the model's own, and those that the client named."""
    ignore_eos: bool = False
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are out."""
    repetition_penalty: float = 1.0
    """Of tokens in prompt or answer: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the answer, once."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the answer, as often as they are there."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit, after penalties); -100 bans, 100 leaves nothing but its like."""
    min_tokens: int = 0
    """No end before the answer has so many tokens."""
    grammar: Grammar | None = None

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the answer so far."""
        return (
            self.grammar is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
        )

    @property
    def reshapes(self) -> bool:
        """Whether draws are from other logits than the model's, temperature and cuts apart."""
        return self.looks_back or bool(self.logit_bias)

    @property
    def looks_at_prompt(self) -> bool:
        return self.repetition_penalty != 1.0

    def needs_prompt(self, first_index: int) -> bool:
        """Whether a draw depends on ids in the prompt of an attempt; those of earlier ones have become part of it."""
        return self.looks_at_prompt or (first_index > 0 and self.looks_back)


class TokenLogprob(Struct, frozen=True, array_like=True):
    logprob: float
    """Of the sampled token, under the unmodified distribution (temperature 1)."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""
