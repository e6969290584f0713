"""Whose fault it is that a sequence can't be continued: its request's, or ours."""

from __future__ import annotations

from shared.protocol.errors import WireError
from shared.protocol.sampling import NO_GRAMMAR, NO_TOKEN, SamplingParams


def blame(error: str, sampling: SamplingParams, tokens: int) -> WireError:
    """What the client is told of an engine's `error` after `tokens` tokens of the answer. Where the request asked for
    what can't be, `param` is the field of SamplingParams; the owner knows what the client calls its `grammar`."""
    if error.startswith(NO_GRAMMAR):
        return WireError("invalid", error.removeprefix(NO_GRAMMAR), param="grammar")
    if error != NO_TOKEN:
        return WireError("internal", error)
    param = "logit_bias" if sampling.logit_bias else "min_tokens" if sampling.min_tokens else "grammar"
    allowed = "" if sampling.grammar is None else " that the grammar allows"
    message = f"no token{allowed} is left at token {tokens} of the answer"
    return WireError("invalid", message if param == "grammar" else f"{param}: {message}", param=param)
