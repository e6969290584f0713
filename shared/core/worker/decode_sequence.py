"""A place at a decode node: a sequence whose KV will land from elsewhere, or is prefilled here."""

from __future__ import annotations

import math
from hashlib import blake2b

from shared.core.kv.block_keys import TOKEN_BYTES, extend_chain, pack_tokens, root_key
from shared.core.kv.pool import BlockPool
from shared.core.machine import Command
from shared.core.worker.answers import Answer
from shared.core.worker.config import WorkerConfig
from shared.core.worker.sequence import SequenceState
from shared.core.worker.transfers import CommitPoolWrite, OpenPoolWrite, SendBlocks
from shared.protocol.ids import AttemptId, BlockKey, Incarnation, LandingId
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


# -- after its end ---------------------------------------------------------------------------------------------


def keep_blocks(pool: BlockPool, sequence: DecodeSequence, worker: WorkerConfig) -> list[Command]:
    """The next turn of its dialogue shall find its blocks: full ones become findable here and go to the pool, if they are
    news to it. The other pages are free at once."""
    keys = (
        computed_keys(sequence, worker.namespace, worker.block_tokens) if worker.token_ids else sequence.keys
    )
    full = min(len(keys), sequence.computed // worker.block_tokens)
    if pool.keeps:
        new = slice(sequence.keyed, full)
        parent = keys[new.start - 1] if 0 < new.start < full else None
        pool.register_chain(sequence.pages[new], keys[new], parent)
    pool.unpin(sequence.pages[full:])
    del sequence.pages[full:]
    news = full > len(sequence.keys) or (sequence.local and full)
    if sequence.pool_node is None or not news:
        return []
    sequence.pool_open = sequence.pool_closing = True
    attempt, pages = sequence.attempt, tuple(sequence.pages)
    return [
        OpenPoolWrite(attempt, sequence.pool_node, worker.namespace, 0, keys[:full], pages),
        SendBlocks(attempt, 0, full, to_handoff=False),
        CommitPoolWrite(attempt),
    ]


def computed_keys(sequence: DecodeSequence, namespace: bytes, block_tokens: int) -> tuple[BlockKey, ...]:
    """Keys of all full blocks of prompt and answer whose KV is computed."""
    full = sequence.computed // block_tokens
    keys = sequence.keys
    if full <= len(keys):
        return keys[:full]
    parent = keys[-1] if keys else root_key(namespace)
    rest = pack_tokens((*sequence.request.tail_tokens, *sequence.answer.tokens))
    wanted_bytes = (full - len(keys)) * block_tokens * TOKEN_BYTES
    return keys + tuple(extend_chain(parent, rest[:wanted_bytes], block_tokens))
