"""One request to a placement: the policy's choice of a prefill node, a decode node, prefix sources and pool, and the
test against the objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.conductor.admission import Admission, Outlook, retry_after
from shared.core.conductor.block_index import BlockIndex, Match
from shared.core.conductor.decode_policies import (
    DecodeCandidate,
    DecodePolicy,
    DecodeView,
    InlineRule,
    predicted_tbt_s,
)
from shared.core.conductor.events import ConductorConfig
from shared.core.conductor.node_registry import ModelGroup, NodeRegistry, NodeState, usable
from shared.core.conductor.placement_policies import Policy
from shared.core.conductor.policy_view import Candidate, Decision, PolicyView
from shared.core.conductor.prefix_sources import best_cache, pool_for, sources_for
from shared.core.kv.block_keys import blocks_for, reusable_blocks
from shared.protocol.errors import Overloaded, TooLarge, TsukimiError, Unavailable
from shared.protocol.ids import NodeRef
from shared.protocol.requests import Placement, PlaceRequest, Prediction


@dataclass(slots=True, eq=False)
class _Asked:
    """A request, and all that was looked up for it."""

    request: PlaceRequest
    group: ModelGroup
    match: Match
    prefills: Sequence[NodeState]
    decodes: Sequence[NodeState]
    now: float

    @property
    def blocks(self) -> int:
        """Room that the prompt and its first token need."""
        return blocks_for(self.request.prompt_tokens + 1, self.group.block_tokens)


@dataclass(slots=True, eq=False)
class _Plan:
    """What was chosen, before it is admitted."""

    prefill: NodeState | None
    decode: NodeState | None
    cached_blocks: int
    remote: bool
    predicted: Prediction
    reason: str


class Scheduler:
    """Places or refuses one request at a time; adds each assignment to its nodes' load estimates."""

    def __init__(
        self,
        config: ConductorConfig,
        policy: Policy,
        decode_policy: DecodePolicy,
        registry: NodeRegistry,
        index: BlockIndex,
    ) -> None:
        self._config = config
        self._policy = policy
        self._decode_policy = decode_policy
        self._registry = registry
        self._index = index
        self._rule = InlineRule(config.inline_tokens, config.objectives.tbt_s)
        self._number = 0
        self._turn = 0
        self.admission = Admission(config.objectives)

    def place(self, request: PlaceRequest, now: float) -> Placement:
        """Raises Unavailable, TooLarge or Overloaded."""
        group = self._registry.groups.get(request.model)
        if group is None or not (group.decodes or (group.prefills and request.max_new_tokens == 1)):
            raise Unavailable(f"no node that serves {request.model!r} is ready")
        prefills, decodes = self._able(request, group, now)
        reusable = reusable_blocks(request.prompt_tokens, group.block_tokens)
        match = self._index.match(request.block_keys[:reusable])
        asked = _Asked(request, group, match, prefills, decodes, now)
        plan = self._plan(asked)
        self._admit(asked, plan)
        self._assign(asked, plan)
        return self._placement(asked, plan)

    # -- who could do it ---------------------------------------------------------------------------------------------

    def _able(
        self, request: PlaceRequest, group: ModelGroup, now: float
    ) -> tuple[Sequence[NodeState], Sequence[NodeState]]:
        """Prefill and decode nodes that could take it now. Decode nodes can prefill too, when nobody else does."""
        blocks = blocks_for(request.prompt_tokens + 1, group.block_tokens)
        prefills = self._with_room(group.prefills, request, blocks, now, True)
        decodes = self._with_room(group.decodes, request, blocks, now, False)
        if not decodes and (request.max_new_tokens > 1 or not prefills):
            raise _overloaded(group.decodes, now)
        if group.prefills and not prefills and not request.retry:
            raise _overloaded(group.prefills, now)
        return prefills, decodes

    def _with_room(
        self, node_states: Sequence[NodeState], request: PlaceRequest, blocks: int, now: float, prefills: bool
    ) -> Sequence[NodeState]:
        able: list[NodeState] = []
        fits = False
        for node_state in node_states:
            if blocks > node_state.most_blocks:
                continue
            fits, estimate = True, node_state.estimate
            if now > estimate.settled_until_s:
                estimate.settle(now)
            if estimate.waiting < node_state.most_waiting if prefills else estimate.requests < node_state.most_requests:
                able.append(node_state)
        if node_states and not fits:
            most = max(p.info.kv_blocks for p in node_states)
            raise TooLarge(
                f"the prompt needs {blocks} KV blocks, the largest node has {most}", param="messages"
            )
        return usable(able, request.avoid)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _plan(self, asked: _Asked) -> _Plan:
        candidates = self._decode_candidates(asked)
        inline_ttft_s, inline = self._best_inline(asked, candidates)
        if not asked.prefills:
            assert inline is not None
            return self._inlined(asked, inline, inline_ttft_s)
        choice = self._choose(asked)
        prompt, decoding, handoff_s = asked.request.prompt_tokens, None, 0.0
        if asked.request.max_new_tokens > 1:
            decoding = self._decode_policy.choose(DecodeView(prompt, asked.blocks, candidates))
            handoff_s = self._config.links.transfer_s(
                prompt * (asked.group.block_bytes // asked.group.block_tokens),
                decoding.host == choice.candidate.host,
            )
        if inline is not None and inline_ttft_s < choice.ttft_s + handoff_s:
            return self._inlined(asked, inline, inline_ttft_s)
        return _Plan(
            prefill=asked.group.by_node[choice.candidate.ref.node],
            decode=asked.group.by_node[decoding.ref.node] if decoding else None,
            cached_blocks=choice.cached_blocks,
            remote=choice.remote,
            predicted=Prediction(
                queue_s=choice.queue_s,
                transfer_s=choice.transfer_s,
                prefill_s=choice.prefill_s,
                ttft_s=choice.ttft_s,
                tbt_s=predicted_tbt_s(decoding, prompt) if decoding else 0.0,
            ),
            reason=choice.reason,
        )

    def _choose(self, asked: _Asked) -> Decision:
        best, holder = best_cache(asked.match, self._registry.caches)
        now, match = asked.now, asked.match
        self._number += 1
        candidates = []
        for p in asked.prefills:
            estimate = p.estimate
            queue_s = estimate.busy_until_s - now if estimate.busy_until_s > now else 0.0
            local = match.run_of_any(p.nearby) if match.runs else 0
            candidates.append(Candidate(p.ref, p.host, p.cost, queue_s, estimate.requests, local))
        return self._policy.place(
            PolicyView(
                prompt_tokens=asked.request.prompt_tokens,
                block_tokens=asked.group.block_tokens,
                block_bytes=asked.group.block_bytes,
                candidates=tuple(candidates),
                best_blocks=best,
                best_host=holder.host if holder else "",
                links=self._config.links,
                number=self._number,
            )
        )

    def _decode_candidates(self, asked: _Asked) -> list[DecodeCandidate]:
        match, block_tokens, candidates = asked.match, asked.group.block_tokens, []
        left = asked.request.prompt_tokens - len(match) * block_tokens
        worth_looking = left <= self._rule.max_tokens or not asked.prefills
        for p in asked.decodes:
            estimate = p.estimate
            free = p.info.kv_blocks - estimate.held_blocks - estimate.pending_tokens // block_tokens
            local = match.run_of_any(p.nearby) if worth_looking else 0
            candidates.append(
                DecodeCandidate(p.ref, p.host, p.cost, estimate.requests, estimate.kv_tokens, free, local)
            )
        return candidates

    def _best_inline(
        self, asked: _Asked, candidates: Sequence[DecodeCandidate]
    ) -> tuple[float, DecodeCandidate | None]:
        """The decode node that would have the first token soonest, if any should prefill by itself."""
        prompt, block_tokens = asked.request.prompt_tokens, asked.group.block_tokens
        rule = self._rule if asked.prefills else InlineRule(max_tokens=prompt)
        if prompt - len(asked.match) * block_tokens > rule.max_tokens:
            return float("inf"), None
        best_s, best = float("inf"), None
        for candidate in candidates:
            ttft_s = rule.ttft_s(candidate, prompt, block_tokens)
            if ttft_s < best_s:
                best_s, best = ttft_s, candidate
        return best_s, best

    def _inlined(self, asked: _Asked, candidate: DecodeCandidate, ttft_s: float) -> _Plan:
        tbt_s = predicted_tbt_s(candidate, asked.request.prompt_tokens)
        return _Plan(
            prefill=None,
            decode=asked.group.by_node[candidate.ref.node],
            cached_blocks=candidate.local_blocks,
            remote=False,
            predicted=Prediction(prefill_s=ttft_s, ttft_s=ttft_s, tbt_s=tbt_s),
            reason=f"prefilled where it is decoded: {candidate.local_blocks} blocks cached, little left to compute",
        )

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _admit(self, asked: _Asked, plan: _Plan) -> None:
        limits = self._config.objectives
        if not (limits.ttft_s or limits.tbt_s):
            return
        used = [p for p in (plan.prefill, plan.decode) if p is not None]
        fitted = [p for p in used if not p.cost_given]
        able = [nodes for nodes in (asked.prefills, asked.decodes) if nodes]
        refusal = self.admission.judge(
            Outlook(
                ttft_s=plan.predicted.ttft_s,
                tbt_s=plan.predicted.tbt_s,
                queue_s=plan.predicted.queue_s,
                decoding=plan.decode.estimate.requests if plan.decode else 0,
                samples=min((p.samples for p in fitted), default=0),
                exact=not fitted,
                idle=all(any(not p.estimate.requests for p in nodes) for nodes in able),
            ),
            retry=asked.request.retry,
        )
        if refusal is not None:
            raise Overloaded(refusal.reason, retry_after_s=refusal.retry_after_s)

    def _assign(self, asked: _Asked, plan: _Plan) -> None:
        work_s = plan.predicted.transfer_s + plan.predicted.prefill_s
        request = asked.request
        for node_state, seconds in ((plan.prefill, work_s), (plan.decode, 0.0)):
            if node_state is not None:
                node_state.estimate.assigned(request.attempt, asked.now, seconds, request.prompt_tokens)
                self._turn += 1
                node_state.turn = self._turn

    def _placement(self, asked: _Asked, plan: _Plan) -> Placement:
        prefiller = plan.prefill or plan.decode
        assert prefiller is not None
        caches = self._registry.caches
        near = self._registry.caches_on.get(prefiller.host, [])
        far = [c for c in caches if c.host != prefiller.host] if plan.remote else []
        pool = pool_for(asked.match, near, caches)
        return Placement(
            attempt=asked.request.attempt,
            prefill=_ref(plan.prefill),
            decode=_ref(plan.decode),
            sources=sources_for(asked.match, prefiller, near, far, plan.cached_blocks),
            pool=_ref(pool),
            decode_pool=_ref(pool) if self._config.pool_answers else None,
            cached_blocks=plan.cached_blocks,
            predicted=plan.predicted,
            policy=self._config.policy,
            reason=plan.reason,
        )


def _overloaded(node_states: Sequence[NodeState], now: float) -> TsukimiError:
    drained_s = min((p.estimate.queue_s(now) for p in node_states), default=1.0)
    return Overloaded("every node's queue is full", retry_after_s=retry_after(max(drained_s, 0.5)))


def _ref(node_state: NodeState | None) -> NodeRef | None:
    return node_state.ref if node_state is not None else None
