"""One request to a placement: who could take it, the policy's choice, the test against the objectives, the booking."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.conductor.admission import Admission, Outlook, retry_after
from shared.core.conductor.block_index import BlockIndex
from shared.core.conductor.candidates import Asked, Candidates
from shared.core.conductor.decision_log import Considered, DecisionLog
from shared.core.conductor.decode_policies import (
    DecodeCandidate,
    DecodePolicy,
    LeastTbt,
    predicted_tbt_s,
)
from shared.core.conductor.events import ConductorConfig
from shared.core.conductor.forecast import Forecast
from shared.core.conductor.load_estimate import PENDING_S
from shared.core.conductor.node_registry import ModelGroup, NodeRegistry, NodeState
from shared.core.conductor.placement_policies import FALLBACK, Policy
from shared.core.conductor.policy_view import Decision, PolicyView
from shared.core.conductor.prefix_sources import pool_for, sources_for
from shared.core.kv.block_keys import reusable_blocks
from shared.protocol.errors import Overloaded, TsukimiError, Unavailable
from shared.protocol.ids import AttemptId, NodeRef, previous_attempt
from shared.protocol.requests import Placement, PlaceRequest, Prediction

_FOREVER = float("inf")


@dataclass(slots=True, eq=False)
class _Plan:
    """What was chosen, before it is admitted."""

    decision: Decision
    prefill: NodeState | None
    """None: the decode node prefills."""
    decode: NodeState | None
    predicted: Prediction
    landing_s: float
    """When all of its KVCache is predicted to be at the decode node."""
    policy: str


class Scheduler:
    """Places or refuses one request at a time; adds each assignment to what is expected of its nodes."""

    def __init__(
        self,
        config: ConductorConfig,
        policy: Policy,
        fallback: Policy,
        decode_policy: DecodePolicy,
        registry: NodeRegistry,
        index: BlockIndex,
    ) -> None:
        self._config = config
        self._policy = policy
        self._fallback = fallback
        self._registry = registry
        self._index = index
        self._turn = 0
        self.policy_error = ""
        """How the policy failed on the last request; empty if it did not."""
        self.forecast = Forecast(config.objectives, config.links)
        self._candidates = Candidates(config, decode_policy, registry, self.forecast)
        self.admission = Admission(config.objectives)
        self.log = DecisionLog(config.decisions_kept)
        self._placed: deque[tuple[float, AttemptId, tuple[NodeState, ...]]] = deque()
        """The latest assignments, oldest first: those that may still be taken back."""

    def place(self, request: PlaceRequest, now: float) -> Placement:
        """Raises Unavailable, TooLarge or Overloaded, or what the policy raises as a TsukimiError."""
        self.policy_error = ""
        previous = previous_attempt(request.attempt)
        if previous:  # what was booked for it is not computed, or is by now
            self.given_up(previous, now)
        group = self._registry.groups.get(request.model)
        if group is None or not (group.decodes or (group.prefills and request.max_new_tokens == 1)):
            raise Unavailable(f"no node that serves {request.model!r} is ready")
        prefills, decodes = self._able(request, group, now)
        reusable = reusable_blocks(request.prompt_tokens, group.block_tokens)
        match = self._index.match(request.block_keys[:reusable])
        asked = Asked(request, group, match, prefills, decodes, now)
        view = self._candidates.view(asked)
        plan = self._chosen(asked, view)
        considered = self.log.considered(request.attempt, now, view, plan.decision, plan.predicted)
        self._admit(asked, plan, considered)
        self._assign(asked, plan)
        return self._placement(asked, plan)

    def given_up(self, attempt: AttemptId, now: float) -> None:
        """Take an assignment back that nobody uses. Harmless if there is none, or if it counts no more anyway."""
        for _, placed, node_states in self._placed:
            if placed == attempt:
                for node_state in node_states:
                    node_state.estimate.released(attempt, now)
                    self.forecast.released(node_state, attempt)

    # -- who could do it ---------------------------------------------------------------------------------------------

    def _able(
        self, request: PlaceRequest, group: ModelGroup, now: float
    ) -> tuple[Sequence[NodeState], Sequence[NodeState]]:
        """Prefill and decode nodes that could take it now. Decode nodes can prefill too, when nobody else does."""
        decodes: Sequence[NodeState] = ()
        prefills = self._candidates.with_room(group.prefills, request, group, now, decode=False)
        if request.max_new_tokens > 1 or not prefills:
            decodes = self._candidates.with_room(group.decodes, request, group, now, decode=True)
        if not decodes and (request.max_new_tokens > 1 or not prefills):
            raise self._overloaded(group.decodes, now)
        if group.prefills and not prefills and not request.retry:
            raise self._overloaded(group.prefills, now)
        return prefills, decodes

    def _overloaded(self, node_states: Sequence[NodeState], now: float) -> TsukimiError:
        drained_s = min((self.forecast.place_free_s(p, now) for p in node_states), default=1.0)
        return Overloaded("every node's queue is full", retry_after_s=retry_after(max(drained_s, 0.5)))

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _chosen(self, asked: Asked, view: PolicyView) -> _Plan:
        """The policy's choice. A user's policy may fail: then a built-in one places this request."""
        try:
            return self._plan(asked, view, self._policy, self._config.policy)
        except TsukimiError:
            raise
        except Exception as bug:
            self.policy_error = _told(bug)
        view.decode_policy = LeastTbt()
        plan = self._plan(asked, view, self._fallback, FALLBACK)
        plan.decision.reason += "; the configured policy failed"
        return plan

    def _plan(self, asked: Asked, view: PolicyView, policy: Policy, name: str) -> _Plan:
        decision = policy.place(view)
        candidate, decode = decision.candidate, None
        if asked.request.max_new_tokens > 1 or candidate.decode is not None:
            decode = candidate.decode or decision.decode or view.usual_decode()
        by_node = asked.group.by_node
        handoff_s = view.handoff_s(candidate, decode, decision.remote) if decode is not None else 0.0
        ttft_s = decision.ttft_s
        if not 0.0 <= ttft_s < _FOREVER:  # it would spoil the estimates of the nodes
            raise ValueError(f"a TTFT of {ttft_s} s is predicted")
        return _Plan(
            policy=name,
            decision=decision,
            prefill=by_node[candidate.ref.node] if candidate.decode is None else None,
            decode=by_node[decode.ref.node] if decode is not None else None,
            predicted=Prediction(
                queue_s=decision.queue_s,
                transfer_s=decision.transfer_s,
                prefill_s=decision.prefill_s,
                ttft_s=ttft_s,
                tbt_s=self._tbt_s(decode, asked.request.prompt_tokens),
            ),
            landing_s=asked.now + ttft_s + handoff_s,
        )

    def _tbt_s(self, decode: DecodeCandidate | None, prompt_tokens: int) -> float:
        return predicted_tbt_s(decode, prompt_tokens) if decode is not None else 0.0

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _admit(self, asked: Asked, plan: _Plan, considered: Considered) -> None:
        objectives = self._config.objectives
        if not objectives.refuses:
            return
        used = [p for p in (plan.prefill, plan.decode) if p is not None]
        fitted = [p for p in used if not p.cost_given]
        able = [nodes for nodes in (asked.prefills, asked.decodes) if nodes]
        tbt_s, drained_s = self.forecast.tbt_s(plan.decode, asked.request.prompt_tokens, asked.now)
        outlook = Outlook(
            ttft_s=plan.predicted.ttft_s,
            tbt_s=tbt_s,
            queue_s=plan.predicted.queue_s,
            samples=min((p.samples for p in fitted), default=0),
            exact=not fitted,
            idle=all(any(not p.estimate.requests for p in nodes) for nodes in able),
            drained_s=drained_s,
        )
        refusal = self.admission.judge(outlook, retry=asked.request.retry)
        considered.judged(outlook, refusal)
        if refusal is not None and not objectives.shadow:
            raise Overloaded(refusal.reason, retry_after_s=refusal.retry_after_s)

    def _assign(self, asked: Asked, plan: _Plan) -> None:
        request, now, decision = asked.request, asked.now, plan.decision
        placed = self._placed
        while placed and now - placed[0][0] > PENDING_S:
            placed.popleft()
        used = tuple([p for p in (plan.prefill, plan.decode) if p is not None])
        placed.append((now, request.attempt, used))
        work_s = decision.transfer_s + decision.prefill_s
        if decision.waits:  # what comes behind it waits, too
            work_s += decision.queue_s - decision.candidate.queue_s
        for node_state, seconds in (
            (plan.prefill, work_s),
            (plan.decode, 0.0 if plan.prefill is not None else work_s),
        ):
            if node_state is not None:
                node_state.estimate.assigned(request.attempt, now, seconds, request.prompt_tokens)
                self._turn += 1
                node_state.turn = self._turn
        prefiller = plan.prefill or plan.decode
        if prefiller is not None and request.block_keys:
            self.forecast.booked.book(
                prefiller.node,
                request.attempt,
                request.block_keys,
                now,
                held_anywhere=len(asked.match),
                ready_s=now + decision.ttft_s,
                busy_until_s=prefiller.estimate.busy_until_s,
            )
        if decision.transfer_s:
            self._candidates.pulls(asked, decision)
        if plan.decode is not None:
            self.forecast.assigned(plan.decode, request.attempt, now, plan.landing_s, request.prompt_tokens)

    def _placement(self, asked: Asked, plan: _Plan) -> Placement:
        decision, request = plan.decision, asked.request
        prefiller = plan.prefill or plan.decode
        assert prefiller is not None
        caches = self._registry.caches
        near = self._registry.caches_on.get(prefiller.host, [])
        far = [c for c in caches if c.host != prefiller.host] if decision.remote else []
        pool = pool_for(asked.match, near, caches)
        sources = sources_for(asked.match, prefiller, near, far, decision.cached_blocks)
        return Placement(
            attempt=request.attempt,
            prefill=_ref(plan.prefill),
            decode=_ref(plan.decode),
            sources=self._candidates.with_booked(sources, asked, decision, pool),
            pool=_ref(pool),
            decode_pool=_ref(pool) if self._config.pool_answers else None,
            cached_blocks=decision.cached_blocks,
            predicted=plan.predicted,
            policy=plan.policy,
            reason=decision.reason,
            tbt_limit_s=0.0 if request.retry else self._config.objectives.late_tbt_s,
        )


def _told(bug: Exception) -> str:
    """What it is, and the line that raised it."""
    frame = bug.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None else ""
    return f"{type(bug).__name__}: {bug}{where}"


def _ref(node_state: NodeState | None) -> NodeRef | None:
    return node_state.ref if node_state is not None else None
