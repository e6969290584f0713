"""One try at one choice: which lives take part, what was heard of them, the messages that set it going."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from shared.core.kv.block_keys import (
    KEY_BYTES,
    TOKEN_BYTES,
    extend_chain,
    pack_tokens,
    root_key,
    unpack_tokens,
)
from shared.core.request.events import ChoiceSpec, LifecycleConfig
from shared.core.request.token_order import TokenOrder
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, BlockKey, Incarnation, NodeId, NodeRef
from shared.protocol.requests import (
    HandoffTarget,
    LocalPrefill,
    Placement,
    PlaceRequest,
    PrefillJob,
    ReserveRequest,
    TokenDelta,
)

End = Literal["stop", "length"]
State = Literal["unknown", "waiting", "running", "finished"]


class Attempt:
    """Facts about the try that is running. Mutable, owned by one RequestMachine."""

    def __init__(self, id_: AttemptId, first_index: int) -> None:
        self.id = id_
        self.first_index = first_index
        self.placement: Placement | None = None
        self.prefill: NodeRef | None = None
        """None: the decode node prefills."""
        self.decode: NodeRef | None = None
        """None: one token only."""
        self.landing = b""
        self.began_s = 0.0
        """When a place was asked for."""
        self.timed = False
        """It was told what the prefill took."""
        self.decode_tokens = 0
        """Tokens of the decode node since its first message with any."""
        self.decode_first_s = self.decode_last_s = 0.0
        """When those came."""
        self.heard_at = 0.0
        self.gap_since = math.inf
        self.end: dict[int, End] = {}
        """How long the whole answer is and why it ends there, by a node's word."""
        self.decode_heard = False
        self.accepted = True
        """False while the decode node may still refuse the sequence, so that no token is shown."""
        self.prefill_lost = False
        self.asked: set[NodeId] = set()
        """Nodes with a sync question out."""
        self.unanswered = 0
        self.stuck = 0
        self._lives: dict[NodeId, Incarnation] = {}

    def use(self, prefill: NodeRef | None, decode: NodeRef | None) -> None:
        self.prefill, self.decode = prefill, decode
        self.accepted = not self.tbt_limit_s or prefill is None or decode is None
        self._lives = {ref.node: ref.incarnation for ref in (prefill, decode) if ref is not None}

    @property
    def tbt_limit_s(self) -> float:
        """What the decode node may refuse by; 0 for an answer that has tokens, whatever the conductor says."""
        return 0.0 if self.first_index or self.placement is None else self.placement.tbt_limit_s

    def on(self, node: NodeId, incarnation: Incarnation) -> bool:
        return self._lives.get(node) == incarnation

    def life_of(self, node: NodeId) -> tuple[NodeId, Incarnation] | None:
        incarnation = self._lives.get(node)
        return None if incarnation is None else (node, incarnation)

    def only_prefills(self, node: NodeId) -> bool:
        """Whether another node goes on after this one's token."""
        return self.prefill is not None and self.prefill.node == node and self.decode is not None

    def heard(self, node: NodeId, delta: TokenDelta, now: float) -> None:
        self.heard_at = now
        self.unanswered = self.stuck = 0
        if delta.finish in ("stop", "length"):
            self.end[delta.index + len(delta.tokens)] = delta.finish
        if self.decode is not None and node == self.decode.node:
            self.accepted |= delta.finish != "refused"
            if delta.tokens:
                self._decoded(len(delta.tokens), now)

    def _decoded(self, tokens: int, now: float) -> None:
        if self.decode_heard:
            self.decode_tokens += tokens
        else:
            self.decode_heard, self.decode_first_s = True, now
        self.decode_last_s = now

    @property
    def tbt_s(self) -> float:
        """Mean time between tokens of the decode node; 0: it made too few."""
        took_s = self.decode_last_s - self.decode_first_s
        return took_s / self.decode_tokens if self.decode_tokens else 0.0

    def how_complete(self, spec: ChoiceSpec, order: TokenOrder, new: Sequence[int]) -> End | None:
        """Why the answer is whole now that `new` tokens came; None if it is not."""
        count, sampling = order.next_index, spec.sampling
        said = self.end.get(count)
        if said == "stop" or (new and not sampling.ignore_eos and new[-1] in sampling.eos_token_ids):
            return "stop"
        return "length" if said == "length" or count == spec.max_new_tokens else None

    def watch_gap(self, order: TokenOrder, now: float) -> None:
        if not order.early and (not self.end or max(self.end) <= order.next_index):
            self.gap_since = math.inf
        elif self.gap_since == math.inf:
            self.gap_since = now

    def quiet_until(self, config: LifecycleConfig) -> float:
        """When to ask what became of the tokens."""
        if self.asked:
            return math.inf
        return min(self.heard_at + config.idle_sync_s, self.gap_since + config.gap_sync_s)

    def makers(self, next_index: int) -> list[NodeId]:
        """Who should be making token `next_index`: prefill the attempt's first, decode the others. If the first
        is missing though decode goes on, both may know it."""
        if self.prefill is None or (self.decode is not None and next_index > self.first_index):
            assert self.decode is not None
            return [self.decode.node]
        if self.decode is not None and self.decode_heard:
            return [self.prefill.node, self.decode.node]
        return [self.prefill.node]

    def hopeless_without(self, node: NodeId, next_index: int) -> bool:
        """`node` won't make the next token: is it nobody else's task, and nobody asked who may know it?"""
        makers = self.makers(next_index)
        return node in makers and not any(other in self.asked for other in makers)

    def judge_answer(self, node: NodeId, state: State, order: TokenOrder) -> str:
        """Why the attempt has no hope, by an answer that brought nothing new; empty if it has."""
        decodes = self.decode is not None and node == self.decode.node
        if state in ("unknown", "finished") or (decodes and order.gap):
            if self.hopeless_without(node, order.next_index):
                return f"{node} knows nothing more of the attempt"
        elif state == "waiting" and decodes and self.prefill_lost:
            self.stuck += 1  # its KV may have come just before: believe it the second time
            if self.stuck >= 2:
                return f"{node} waits for KV of a lost prefill node"
        return ""

    def judge_silence(self, node: NodeId, error: WireError, patient: bool, tries: int) -> bool:
        """Whether a node that did not answer is to be given up. `patient`: it may be reconnecting."""
        self.unanswered += 1
        return (error.code == "unavailable" and not patient) or self.unanswered >= tries

    def holders(self, phase: str) -> list[NodeId]:
        """Nodes that may hold something for the attempt: asked already, and not known to be done with it."""
        nodes: list[NodeId] = []
        if self.decode is not None:
            nodes.append(self.decode.node)
        handed_over = self.decode_heard or self.prefill_lost
        if self.prefill is not None and phase != "reserving" and not handed_over:
            nodes.append(self.prefill.node)
        return nodes


# -- messages --------------------------------------------------------------------------------------------------


def place_request(
    spec: ChoiceSpec,
    id_: AttemptId,
    answer: Sequence[int],
    budget_s: float,
    avoid: tuple[tuple[NodeId, Incarnation], ...],
    retry: bool,
) -> PlaceRequest:
    return PlaceRequest(
        attempt=id_,
        model=spec.model,
        prompt_tokens=spec.prompt_tokens + len(answer),
        block_keys=keys_with(spec, answer),
        max_new_tokens=spec.max_new_tokens - len(answer),
        budget_s=budget_s,
        avoid=avoid,
        retry=retry,
    )


def reserve_request(
    spec: ChoiceSpec, attempt: Attempt, answer: Sequence[int], budget_s: float, moves: int
) -> ReserveRequest:
    assert attempt.decode is not None
    assert attempt.placement is not None
    tokens = spec.prompt + pack_tokens(answer) if spec.prompt else b""
    block_bytes = spec.block_tokens * TOKEN_BYTES
    local = LocalPrefill(tokens, attempt.placement.sources) if attempt.prefill is None else None
    looked_at = local is None and spec.sampling.needs_prompt(attempt.first_index)
    return ReserveRequest(
        attempt=attempt.id,
        gateway=spec.gateway,
        gateway_incarnation=spec.gateway_incarnation,
        incarnation=attempt.decode.incarnation,
        namespace=spec.namespace,
        prompt_tokens=spec.prompt_tokens + len(answer),
        max_new_tokens=spec.max_new_tokens - len(answer),
        sampling=spec.sampling,
        block_keys=keys_with(spec, answer),
        tail_tokens=tuple(unpack_tokens(tokens[len(tokens) // block_bytes * block_bytes :])),
        pool=attempt.placement.decode_pool,
        local=local,
        budget_s=budget_s,
        first_index=attempt.first_index,
        tokens=tokens if looked_at else b"",
        tbt_limit_s=attempt.tbt_limit_s,
        moves=moves,
    )


def prefill_job(spec: ChoiceSpec, attempt: Attempt, answer: Sequence[int], budget_s: float) -> PrefillJob:
    assert attempt.prefill is not None
    assert attempt.placement is not None
    return PrefillJob(
        attempt=attempt.id,
        gateway=spec.gateway,
        gateway_incarnation=spec.gateway_incarnation,
        incarnation=attempt.prefill.incarnation,
        namespace=spec.namespace,
        tokens=spec.prompt + pack_tokens(answer) if spec.prompt else b"",
        block_keys=keys_with(spec, answer),
        sampling=spec.sampling,
        max_new_tokens=spec.max_new_tokens - len(answer),
        sources=attempt.placement.sources,
        pool=attempt.placement.pool,
        handoff=HandoffTarget(attempt.decode, attempt.landing) if attempt.decode is not None else None,
        budget_s=budget_s,
        first_index=attempt.first_index,
        prompt_tokens=spec.prompt_tokens + len(answer),
    )


def _private_keys(spec: ChoiceSpec, answer_tokens: int) -> tuple[BlockKey, ...]:
    """Keys of the answer's full blocks where token ids are unknown. Only this answer has them."""
    full = (spec.prompt_tokens + answer_tokens) // spec.block_tokens
    names = (f"{spec.request}/{spec.choice}/{i}".encode() for i in range(len(spec.block_keys), full))
    return tuple(blake2b(name, digest_size=KEY_BYTES).digest() for name in names)


def keys_with(spec: ChoiceSpec, answer: Sequence[int]) -> tuple[BlockKey, ...]:
    """Keys of the full blocks of prompt + answer so far."""
    if not answer:
        return spec.block_keys
    if not spec.prompt:
        return spec.block_keys + _private_keys(spec, len(answer))
    parent = spec.block_keys[-1] if spec.block_keys else root_key(spec.namespace)
    rest = spec.prompt[len(spec.block_keys) * spec.block_tokens * TOKEN_BYTES :] + pack_tokens(answer)
    return spec.block_keys + tuple(extend_chain(parent, rest, spec.block_tokens))
