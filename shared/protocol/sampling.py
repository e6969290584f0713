"""How the next token is sampled, and the logprobs that come with it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

BIAS_MOST = 100.0
"""Largest logit_bias, either way: it bans a token, or leaves nothing but its like."""
TOP_LOGPROBS_MOST = 20
"""Most likeliest tokens that are told with a drawn one."""
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


NO_TOKEN = "no token is allowed"
"""Error text if bias, grammar and length together allow no token. The request causes this, not the node."""
NO_GRAMMAR = "grammar: "
"""Start of the error text if a grammar can't be followed. The request causes this, not the node."""


class Grammar(Struct, frozen=True):
    """A constraint that the whole answer must satisfy."""

    kind: GrammarKind
    text: str = ""
    """By kind: the schema as JSON, the regular expression, the choices as JSON, or a grammar in Lark or GBNF. Empty for
    `json_object`."""


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
    """Tokens that end the answer: the model's own, and those the client asked for."""
    ignore_eos: bool = False
    min_p: float = 0.0
    """Tokens whose probability is below this share of the likeliest token's are excluded."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt or the answer, positive logits are divided by it and negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that is in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token in the answer, once per occurrence."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit, after penalties); -100 bans the token, 100 leaves only tokens with the same bias."""
    min_tokens: int = 0
    """The answer does not end before it has this many tokens."""
    grammar: Grammar | None = None

    @property
    def looks_back(self) -> bool:
        """Whether sampling depends on the answer so far."""
        return (
            self.grammar is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
        )

    @property
    def reshapes(self) -> bool:
        """Whether logits are changed before sampling, apart from temperature and cuts (top_k, top_p, min_p)."""
        return self.looks_back or bool(self.logit_bias)

    @property
    def looks_at_prompt(self) -> bool:
        return self.repetition_penalty != 1.0

    def needs_prompt(self, first_index: int) -> bool:
        """Whether sampling needs the token ids of this attempt's prompt, which include the tokens of earlier attempts."""
        return self.looks_at_prompt or (first_index > 0 and self.looks_back)


class TokenLogprob(Struct, frozen=True, array_like=True):
    logprob: float
    """Of the sampled token, under the model's unmodified distribution (temperature 1)."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""
