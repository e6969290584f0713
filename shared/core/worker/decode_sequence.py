"""A place at a decode node: a sequence whose KV will land from elsewhere, or is prefilled here."""

from __future__ import annotations

import math
from hashlib import blake2b

from shared.core.worker.answers import Answer
from shared.core.worker.sequence import SequenceState
from shared.protocol.ids import AttemptId, Incarnation, LandingId
from shared.protocol.requests import ReserveRequest


class DecodeSequence(SequenceState):
    landing: LandingId = b""
    landing_open: bool = False
    """Somebody may write into the pages."""
    landing_closing: bool = False
    lease_s: float = 0.0
    lease_until: float = 0.0
    timer_at: float = math.inf
    """When the lease is looked at next."""
    kept: bool = False
    """Its blocks were put where the next turn finds them."""

    def __init__(self, request: ReserveRequest) -> None:
        local = request.local
        super().__init__(
            attempt=request.attempt,
            gateway=request.gateway,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            keys=request.block_keys,
            tokens=local.tokens if local else request.tokens,
            sources=local.sources if local else (),
            pool_node=request.pool,
            answer=Answer(request.first_index),
        )
        self.request = request

    @property
    def local(self) -> bool:
        return self.request.local is not None

    @property
    def quiet(self) -> bool:
        return not (
            self.in_step or self.pool_open or self.landing_open or self.fetching >= 0 or self.farewell
        )


def same_request(a: ReserveRequest, b: ReserveRequest) -> bool:
    """Whether b is a redelivery of a (the time left may differ)."""
    return (
        a.gateway_incarnation == b.gateway_incarnation
        and a.gateway == b.gateway
        and a.prompt_tokens == b.prompt_tokens
        and a.max_new_tokens == b.max_new_tokens
        and a.first_index == b.first_index
        and a.sampling == b.sampling
        and a.block_keys == b.block_keys
        and a.tail_tokens == b.tail_tokens
        and a.tokens == b.tokens
        and (a.local is None) == (b.local is None)
    )


def landing_id(incarnation: Incarnation, attempt: AttemptId, count: int) -> LandingId:
    """Never the same twice, and unknown to whoever was not told."""
    return blake2b(
        f"{incarnation}\n{attempt}\n{count}".encode(), digest_size=16, person=b"tsukimi-landing"
    ).digest()
