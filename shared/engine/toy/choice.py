"""Changes the toy's logits as a request asks, and draws one token. The rules are those of sampling.reshape and
sampling.draw_batch, applied to sparse logits: most ids are absent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b

from shared.core.kv.block_keys import TOKEN_BYTES, unpack_tokens
from shared.core.worker.steps import SequenceStep
from shared.engine.sampling.bias import added
from shared.engine.sampling.draw import uniform
from shared.protocol.sampling import NO_TOKEN, SamplingParams, TokenLogprob
from shared.text.grammar import Follower, Next, byte_tokenizer
from shared.text.toy_text import BOS, EOS, ROLE, VOCAB_SIZE

Logits = Mapping[int, float]
"""Token id -> logit; ids that are absent have probability 0."""

ABSENT = -50.0
"""Logit of an absent token when a bias or a grammar needs one."""
_TASTE = {EOS: 9.0, **dict.fromkeys(b"]}", 8.0), ord('"'): 7.0, **dict.fromkeys(b",:", 3.0)}
_DIGIT, _PRINTABLE, _OTHER = 2.0, 0.0, -20.0


class NoToken(ValueError):
    """Nothing can be drawn for this sequence."""


def toy_follower() -> Follower:
    return Follower(byte_tokenizer(VOCAB_SIZE, (BOS, EOS, ROLE), EOS))


def shape(logits: Logits, step: SequenceStep, follower: Follower, content: bytes) -> Logits:
    """`logits`, changed as the step's sampling parameters ask. `content` is the digest that `logits` come from. Raises
    GrammarError, or NoToken if no token is left."""
    params = step.sample
    assert params is not None
    past = unpack_tokens(step.past)
    answer = past[len(past) - step.answered :]
    following: Next | None = None
    if params.grammar is not None:
        packed = step.past[len(step.past) - step.answered * TOKEN_BYTES :]
        following = follower.next(step.attempt, params.grammar, packed)
        logits = _with_all_allowed(logits, following.allowed, content)
    shaped = _penalised(logits, params, past, answer)
    for id_, bias in params.logit_bias:
        if not 0 <= id_ < VOCAB_SIZE:
            raise NoToken(f"logit_bias names tokens outside the vocabulary of {VOCAB_SIZE}")
        more = added(bias)
        if more == -math.inf:
            shaped.pop(id_, None)
        elif id_ in shaped or following is None:
            shaped[id_] = shaped.get(id_, ABSENT) + more
    if step.answered < params.min_tokens and not (following is not None and following.complete):
        for id_ in params.eos_token_ids:
            shaped.pop(id_, None)
    if not shaped:
        raise NoToken(NO_TOKEN)
    return shaped


def _with_all_allowed(logits: Logits, allowed: bytes, content: bytes) -> Logits:
    """Logits for a grammar. If a script gives the next token and the grammar allows it, nothing changes. Else all allowed
    tokens and no others have logits: their own, or if absent by kind, highest for EOS, then for closing brackets."""
    ids = [id_ for id_ in range(VOCAB_SIZE) if allowed[id_ >> 3] >> (id_ & 7) & 1]
    if len(logits) == 1 and set(logits) <= set(ids):
        return logits
    return {id_: logits.get(id_, _taste(id_, content)) for id_ in ids}


def _taste(id_: int, content: bytes) -> float:
    noise = blake2b(id_.to_bytes(2, "little"), key=content, digest_size=1).digest()[0] / 256
    if id_ in _TASTE:
        return _TASTE[id_]
    if id_ in b"0123456789":
        return _DIGIT + noise
    return noise + (_PRINTABLE if 0x20 < id_ < 0x7F and id_ != ord("\\") else _OTHER)


def _penalised(
    logits: Logits, params: SamplingParams, past: list[int], answer: list[int]
) -> dict[int, float]:
    shaped = dict(logits)
    if params.repetition_penalty != 1.0:
        for id_ in shaped.keys() & set(past):
            logit = shaped[id_]
            shaped[id_] = (
                logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
            )
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(answer)
        for id_ in shaped.keys() & counts.keys():
            shaped[id_] -= counts[id_] * params.frequency_penalty + params.presence_penalty
    return shaped


def pick(
    logits: Logits, sampling: SamplingParams, position: int, shaped: Logits | None = None
) -> tuple[int, TokenLogprob | None]:
    """The token for absolute position `position`, from `shaped` if that is given. Greedy ties go to the lowest id.
    Logprobs are of `logits`."""
    ranked = _rank(logits)
    choice = ranked if shaped is None else _rank(shaped)
    if sampling.temperature == 0:
        token = choice[0][0]
    else:
        token = _draw(choice, sampling, uniform(sampling.seed, position))
    if sampling.top_logprobs is None:
        return token, None
    norm = math.log(math.fsum(math.exp(logit) for _, logit in ranked))
    top = tuple((id_, logit - norm) for id_, logit in ranked[: sampling.top_logprobs])
    return token, TokenLogprob(logits.get(token, ABSENT) - norm, top)


def _rank(logits: Logits) -> list[tuple[int, float]]:
    return sorted(logits.items(), key=lambda item: (-item[1], item[0]))


def _draw(ranked: list[tuple[int, float]], sampling: SamplingParams, at: float) -> int:
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    best = ranked[0][1]
    weights = [(id_, math.exp((logit - best) / sampling.temperature)) for id_, logit in ranked]
    weights = [(id_, weight) for id_, weight in weights if weight >= min(sampling.min_p, 1.0)]
    wanted = sampling.top_p * math.fsum(weight for _, weight in weights)
    kept, mass = [], 0.0
    for id_, weight in weights:
        kept.append((id_, weight))
        mass += weight
        if mass >= wanted:
            break
    kept.sort()
    target, below = at * mass, 0.0
    for id_, weight in kept:
        below += weight
        if below > target:
            return id_
    return kept[-1][0]
