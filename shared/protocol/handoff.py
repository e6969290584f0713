"""What a prefill node sends to the decode node along with the end of a prompt's KV, over the data plane."""

from __future__ import annotations

from msgspec import Struct

from shared.protocol.sampling import TokenLogprob


class HandoffInfo(Struct, frozen=True):
    """Sent as msgpack inside the commit of a landing."""

    first_token: int
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0
