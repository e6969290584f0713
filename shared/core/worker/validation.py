"""Why a worker refuses a request whatever its load: checks on the request alone."""

from __future__ import annotations

from shared.core.kv.block_keys import TOKEN_BYTES, blocks_for
from shared.core.worker.config import WorkerConfig
from shared.protocol.errors import (
    Invalid,
    Overloaded,
    Refused,
    TooLarge,
    TsukimiError,
    Unavailable,
    retry_within_reason,
)
from shared.protocol.requests import PrefillJob, ReserveRequest


def misfit(
    config: WorkerConfig, request: PrefillJob | ReserveRequest, prompt_tokens: int
) -> TsukimiError | None:
    """Whether this life of this node could ever take the request."""
    full = prompt_tokens // config.block_tokens
    if request.incarnation != config.incarnation:
        return Unavailable(f"{config.node} was restarted")
    if request.namespace != config.namespace:
        return Refused(f"{config.node} serves another model, dtype or block layout")
    if prompt_tokens < 1:
        return Invalid("the prompt is empty", param="tokens")
    if request.max_new_tokens < 1:
        return Invalid("at least one token must be wanted", param="max_new_tokens")
    if len(request.block_keys) != full:
        return Invalid(f"{len(request.block_keys)} keys for {full} full blocks", param="block_keys")
    if config.context_tokens and prompt_tokens >= config.context_tokens:
        return TooLarge(f"{prompt_tokens} tokens; the context holds {config.context_tokens}", param="tokens")
    return None


def bad_tokens(config: WorkerConfig, tokens: bytes, prompt_tokens: int) -> TsukimiError | None:
    if len(tokens) == prompt_tokens * TOKEN_BYTES or not (tokens or config.token_ids):
        return None
    return Invalid(f"{len(tokens)} bytes of token ids for {prompt_tokens} tokens", param="tokens")


def bad_tail(config: WorkerConfig, request: ReserveRequest) -> TsukimiError | None:
    """Without the ids after the last full block the answer's blocks would get wrong keys."""
    tail = request.prompt_tokens % config.block_tokens
    if len(request.tail_tokens) == tail:
        return None
    return Invalid(
        f"{len(request.tail_tokens)} tokens after the last full block, not {tail}", param="tail_tokens"
    )


def bad_past(config: WorkerConfig, request: ReserveRequest) -> TsukimiError | None:
    """Without the ids that sampling looks back on its tokens would be others than before."""
    if request.local is not None or not config.token_ids:
        return None
    needed = request.sampling.needs_prompt(request.first_index)
    return bad_tokens(config, request.tokens, request.prompt_tokens) if needed or request.tokens else None


def never_fits(config: WorkerConfig, tokens: int) -> TsukimiError | None:
    """Its KV would not fit even an empty node: refused at the door, so that it blocks nobody."""
    blocks = blocks_for(tokens, config.block_tokens)
    if blocks <= config.pages:
        return None
    return TooLarge(f"needs {blocks} KV blocks; {config.node} has {config.pages}", param="tokens")


def overloaded(why: str, retry_after_s: float) -> Overloaded:
    return Overloaded(why, retry_after_s=retry_within_reason(retry_after_s))
