"""What a prefill node tells the decode node with the last of a prompt's KV, over the data plane."""

from __future__ import annotations

from msgspec import Struct

from shared.protocol.sampling import TokenLogprob


class HandoffInfo(Struct, frozen=True):
    """Rides on the commit of a landing (msgpack)."""

    first_token: int
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0
