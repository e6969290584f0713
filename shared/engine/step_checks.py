"""Checks that every engine makes before it computes a sequence. A bad sequence is refused alone; the others run."""

from __future__ import annotations

from shared.core.kv.block_keys import blocks_for, unpack_tokens
from shared.core.worker.steps import SequenceStep
from shared.protocol.model import ModelSpec


def refusal(sequence: SequenceStep, spec: ModelSpec, pages: int) -> str:
    """Why an engine with `pages` pages cannot run this sequence; empty if it can."""
    tokens = unpack_tokens(sequence.token_ids)
    end = sequence.start + sequence.tokens
    if len(tokens) != sequence.tokens or not tokens:
        return f"{len(tokens)} token ids for a step of {sequence.tokens}"
    if max(tokens) >= spec.vocab_size:
        return f"token id {max(tokens)} is outside the vocabulary of {spec.vocab_size}"
    if sequence.start < 0 or end > spec.context_tokens:
        return f"positions {sequence.start} to {end} are beyond the context of {spec.context_tokens} tokens"
    if len(sequence.pages) < blocks_for(end, spec.layout.block_tokens):
        return f"{len(sequence.pages)} pages do not hold {end} tokens"
    if min(sequence.pages) < 0 or max(sequence.pages) >= pages:
        return f"pages {min(sequence.pages)} to {max(sequence.pages)} are not among the engine's {pages}"
    return ""
