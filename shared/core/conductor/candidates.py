"""What a policy is shown: the nodes that could take a request, each with what is predicted for it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.core.conductor.block_index import Match
from shared.core.conductor.decode_policies import DecodeCandidate, DecodePolicy
from shared.core.conductor.events import ConductorConfig
from shared.core.conductor.forecast import Forecast
from shared.core.conductor.node_registry import ModelGroup, NodeRegistry, NodeState, usable
from shared.core.conductor.policy_view import Candidate, Decision, PolicyView
from shared.core.conductor.prediction.booked_blocks import Coming
from shared.core.conductor.prefix_sources import best_cache, pool_for
from shared.core.costs.model import compute_s, step_s
from shared.core.kv.block_keys import blocks_for
from shared.protocol.errors import TooLarge
from shared.protocol.requests import BlockSource, PlaceRequest

COMMIT_S = 0.05
"""How long after its own prefill a node finds the blocks at its cache node."""


@dataclass(slots=True, eq=False)
class Asked:
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


class Candidates:
    """Makes the view of one request at a time."""

    def __init__(
        self, config: ConductorConfig, decode_policy: DecodePolicy, registry: NodeRegistry, forecast: Forecast
    ) -> None:
        self._config = config
        self._decode_policy = decode_policy
        self._registry = registry
        self._forecast = forecast
        self._number = 0

    # -- who has room ------------------------------------------------------------------------------------------------

    def with_room(
        self,
        node_states: Sequence[NodeState],
        request: PlaceRequest,
        group: ModelGroup,
        now: float,
        *,
        decode: bool,
    ) -> Sequence[NodeState]:
        """Those that could take it now. Of decode nodes, those that can hold the whole answer, if any can: an answer that
        outgrows its node has to move. Raises TooLarge if the prompt fits none."""
        blocks = blocks_for(request.prompt_tokens + 1, group.block_tokens)
        whole = (
            blocks_for(request.prompt_tokens + request.max_new_tokens, group.block_tokens) if decode else 0
        )
        able: list[NodeState] = []
        roomy = 0
        fits = False
        for node_state in node_states:
            most_blocks = node_state.most_blocks
            if blocks > most_blocks:
                continue
            fits, estimate = True, node_state.estimate
            if now > estimate.settled_until_s:
                estimate.settle(now)
            if (
                estimate.requests < node_state.most_requests
                if decode
                else estimate.waiting < node_state.most_waiting
            ):
                able.append(node_state)
                if whole <= most_blocks:
                    roomy += 1
        if node_states and not fits:
            most = max(p.info.kv_blocks for p in node_states)
            raise TooLarge(
                f"the prompt needs {blocks} KV blocks, the largest node has {most}", param="messages"
            )
        if roomy and roomy < len(able):
            able = [p for p in able if whole <= p.most_blocks]
        return usable(able, request.avoid)

    # -- the view ----------------------------------------------------------------------------------------------------

    def view(self, asked: Asked) -> PolicyView:
        self._number += 1
        now, match, group, request = asked.now, asked.match, asked.group, asked.request
        best, holder = best_cache(match, self._registry.caches, self._forecast.senders, now)
        coming = self._coming(asked)
        decodes: list[DecodeCandidate] = []

        def decodes_of() -> Sequence[DecodeCandidate]:
            if not decodes:
                decodes.extend([self._decode(asked, p) for p in asked.decodes])
            return decodes

        locals_: Sequence[Candidate] = ()
        candidates: Sequence[Candidate]
        if asked.prefills:
            candidates = [self._prefill(asked, p) for p in asked.prefills]
            locals_ = self._locals(asked, decodes_of)
        else:
            candidates = [self._local(asked, p, d) for p, d in zip(asked.decodes, decodes_of(), strict=True)]
        return PolicyView(
            prompt_tokens=request.prompt_tokens,
            block_tokens=group.block_tokens,
            block_bytes=group.block_bytes,
            candidates=candidates,
            best_blocks=best,
            best_host=holder.host if holder else "",
            links=self._forecast.links.now,
            number=self._number,
            locals=locals_,
            coming=coming,
            coming_host=self._host_of(coming),
            coming_wait_s=self._late_s(coming, now),
            sender_wait_s=self._forecast.senders.wait_s(holder.host, now) if holder else 0.0,
            answer_tokens=self._forecast.lengths.mean,
            blocks=asked.blocks,
            decodes_of=decodes_of,
            decode_policy=self._decode_policy,
        )

    def _coming(self, asked: Asked) -> Coming | None:
        """What a prefill under way will make the best prefix, if a cache node on its host gets it."""
        most = (asked.request.prompt_tokens - 1) // asked.group.block_tokens
        keys = asked.request.block_keys
        coming = self._forecast.booked.coming(
            keys[:most] if len(keys) > most else keys, len(asked.match), asked.now
        )
        return coming if coming is not None and self._host_of(coming) else None

    def _late_s(self, coming: Coming | None, now: float) -> float:
        return (
            self._forecast.senders.wait_s(self._host_of(coming), now + coming.in_s)
            if coming is not None
            else 0.0
        )

    def _host_of(self, coming: Coming | None) -> str:
        node_state = self._registry.named(coming.node) if coming is not None else None
        return (
            node_state.host if node_state is not None and node_state.host in self._registry.caches_on else ""
        )

    def _prefill(self, asked: Asked, node_state: NodeState) -> Candidate:
        busy_s = node_state.estimate.busy_until_s - asked.now
        return Candidate(
            node_state.ref,
            node_state.host,
            node_state.cost,
            busy_s if busy_s > 0.0 else 0.0,
            node_state.estimate.requests,
            self._run(asked, node_state),
            chunk_tokens=node_state.info.chunk_tokens,
            held_blocks=self._held(asked, node_state),
        )

    def _run(self, asked: Asked, node_state: NodeState) -> int:
        """Leading blocks that it will not have to compute when its turn comes."""
        request, held = asked.request, self._held(asked, node_state)
        most = (request.prompt_tokens - 1) // asked.group.block_tokens
        booked = self._forecast.booked.run(node_state.node, request.block_keys, held)
        return booked if booked < most else most

    def _held(self, asked: Asked, node_state: NodeState) -> int:
        return asked.match.run_of_any(node_state.nearby) if asked.match.runs else 0

    def _decode(self, asked: Asked, node_state: NodeState) -> DecodeCandidate:
        estimate = node_state.estimate
        free = (
            node_state.info.kv_blocks
            - estimate.held_blocks
            - estimate.pending_tokens // asked.group.block_tokens
        )
        return DecodeCandidate(
            node_state.ref,
            node_state.host,
            node_state.cost,
            estimate.requests,
            estimate.kv_tokens,
            free,
            asked.match.run_of_any(node_state.nearby),
            node_state.info.max_running,
        )

    def _local(self, asked: Asked, node_state: NodeState, decode: DecodeCandidate) -> Candidate:
        """A decode node that prefills by itself: after its own queue and the step that runs, between its sequences."""
        estimate, cost = node_state.estimate, node_state.cost
        step = step_s(cost, estimate.requests, estimate.kv_tokens) if estimate.requests else 0.0
        return Candidate(
            node_state.ref,
            node_state.host,
            cost,
            estimate.queue_s(asked.now) + step / 2,
            estimate.requests,
            self._run(asked, node_state),
            chunk_tokens=node_state.info.chunk_tokens,
            decode=decode,
            chunk_extra_s=max(0.0, step - cost.step_fixed_s),
            held_blocks=self._held(asked, node_state),
        )

    def _locals(
        self, asked: Asked, decodes_of: Callable[[], Sequence[DecodeCandidate]]
    ) -> Sequence[Candidate]:
        """Decode nodes where so little is left to compute that the batch they run hardly waits."""
        config, block_tokens = self._config, asked.group.block_tokens
        prompt = asked.request.prompt_tokens
        if not asked.decodes or prompt - len(asked.match) * block_tokens > config.inline_tokens:
            return ()
        found = []
        for node_state, decode in zip(asked.decodes, decodes_of(), strict=True):
            cached = decode.local_blocks * block_tokens
            left = prompt - cached
            if left > config.inline_tokens:
                continue
            if config.objectives.tbt_most_s > 0.0:
                running_s = step_s(decode.cost, decode.requests, decode.kv_tokens) if decode.requests else 0.0
                if running_s + compute_s(decode.cost, cached, left) > config.objectives.tbt_most_s:
                    continue
            found.append(self._local(asked, node_state, decode))
        return found

    # -- after the choice --------------------------------------------------------------------------------------------

    def pulls(self, asked: Asked, decision: Decision) -> None:
        """Book what a host will send for this decision."""
        if decision.waits:
            self._pulls_coming(asked, decision)
            return
        best, holder = best_cache(asked.match, self._registry.caches, self._forecast.senders, asked.now)
        if holder is not None and holder.host != decision.candidate.host:
            missing = best - decision.candidate.local_blocks
            seconds = self._forecast.links.now.transfer_s(missing * asked.group.block_bytes, False)
            self._forecast.senders.booked(holder.host, asked.now, seconds)

    def _pulls_coming(self, asked: Asked, decision: Decision) -> None:
        coming = self._coming(asked)
        host = self._host_of(coming)
        if coming is not None and host != decision.candidate.host:
            pulled = coming.blocks - decision.candidate.local_blocks
            seconds = self._forecast.links.now.transfer_s(pulled * asked.group.block_bytes, False)
            self._forecast.senders.booked(host, asked.now + coming.in_s, seconds)

    def with_booked(
        self, sources: tuple[BlockSource, ...], asked: Asked, decision: Decision, pool: NodeState | None
    ) -> tuple[BlockSource, ...]:
        """The sources, and behind them the cache node that gets the blocks this decision counts on and nobody holds yet.
        A node reads its own earlier writes there, if it has no memory of its own, or another node's."""
        prefiller = asked.group.by_node[decision.candidate.ref.node]
        if decision.waits:
            return (*sources, *self._awaited(asked, decision))
        if pool is None or decision.remote or pool.host != prefiller.host:
            return sources
        held = asked.match.run_of_any(prefiller.nearby) if asked.match.runs else 0
        booked = decision.cached_blocks - held
        if booked <= 0 or prefiller.load is None or prefiller.load.kv_blocks_cached:
            return sources
        return (*sources, BlockSource(holder=pool.ref, first_block=held, blocks=booked, ready_in_s=COMMIT_S))

    def _awaited(self, asked: Asked, decision: Decision) -> tuple[BlockSource, ...]:
        coming = self._coming(asked)
        near = self._registry.caches_on.get(self._host_of(coming), [])
        pool = pool_for(asked.match, near, near)
        if coming is None or pool is None:
            return ()
        held = decision.candidate.held_blocks
        ready_in_s = max(coming.in_s, COMMIT_S)
        return (
            BlockSource(
                holder=pool.ref, first_block=held, blocks=coming.blocks - held, ready_in_s=ready_in_s
            ),
        )
