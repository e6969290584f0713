"""One request to a placement: the policy's choice of a prefill node, a decode node, prefix sources and pool, and the
test against the objectives."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shared.core.admission import Admission, Outlook, retry_after
from shared.core.blocks import blocks_for, reusable_blocks
from shared.core.conductor_events import ConductorConfig
from shared.core.decode_choice import Decoder, InlineRule, choose_decoder, predicted_tbt_s
from shared.core.index import BlockIndex, Match
from shared.core.placement import Candidate, Choice, PlaceView, Policy
from shared.core.roster import Peer, Roster, Team, usable
from shared.core.sources import best_cache, pool_for, sources_for
from shared.protocol.errors import Overloaded, TooLarge, TsukimiError, Unavailable
from shared.protocol.ids import NodeRef
from shared.protocol.requests import Placement, PlaceRequest, Prediction


class _Plan(Struct, frozen=True):
    """What was chosen, before it is admitted."""

    prefill: Peer | None
    decode: Peer | None
    cached_blocks: int
    remote: bool
    predicted: Prediction
    reason: str


class Placer:
    """Places or refuses one request at a time; remembers assignments in the peers' books."""

    def __init__(self, config: ConductorConfig, policy: Policy, roster: Roster, index: BlockIndex) -> None:
        self._config = config
        self._policy = policy
        self._roster = roster
        self._index = index
        self.admission = Admission(config.objectives)
        self._inline = InlineRule(config.inline_tokens, config.objectives.tbt_s)
        self._number = 0
        self._turn = 0

    def place(self, request: PlaceRequest, now: float) -> Placement:
        """Raises Unavailable, TooLarge or Overloaded."""
        team = self._roster.teams.get(request.model)
        prefills, decodes = self._able(request, team, now)
        assert team is not None
        reusable = reusable_blocks(request.prompt_tokens, team.layout.block_tokens)
        match = self._index.match(request.block_keys[:reusable])
        plan = self._plan(request, team, match, prefills, decodes, now)
        self._admit(request, plan, prefills, decodes, now)
        self._assign(request, plan, now)
        return self._placement(request, plan, match)

    # -- who could do it ---------------------------------------------------------------------------------------------

    def _able(
        self, request: PlaceRequest, team: Team | None, now: float
    ) -> tuple[Sequence[Peer], Sequence[Peer]]:
        """Prefill and decode nodes that could take it now. Decode nodes can prefill too, when nobody else does."""
        if team is None or not (team.decodes or (team.prefills and request.max_new_tokens == 1)):
            raise Unavailable(f"no node that serves {request.model!r} is ready")
        blocks = blocks_for(request.prompt_tokens + 1, team.layout.block_tokens)
        prefills = self._with_room(team.prefills, request, blocks, now)
        decodes = self._with_room(team.decodes, request, blocks, now)
        needs_decode = request.max_new_tokens > 1 or not prefills
        if needs_decode and not decodes:
            raise self._overloaded(team.decodes, now)
        if team.prefills and not prefills and not request.retry:
            raise self._overloaded(team.prefills, now)
        return prefills, decodes

    def _with_room(
        self, peers: Sequence[Peer], request: PlaceRequest, blocks: int, now: float
    ) -> Sequence[Peer]:
        large = [p for p in peers if p.fits(blocks)]
        if peers and not large:
            most = max(p.member.info.kv_blocks for p in peers)
            raise TooLarge(
                f"the prompt needs {blocks} KV blocks, the largest node has {most}", param="messages"
            )
        return usable([p for p in large if not _full(p, now)], request.avoid)

    def _overloaded(self, peers: Sequence[Peer], now: float) -> TsukimiError:
        drained_s = min((p.book.queue_s(now) for p in peers), default=1.0)
        return Overloaded("every node's queue is full", retry_after_s=retry_after(max(drained_s, 0.5)))

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _plan(
        self,
        request: PlaceRequest,
        team: Team,
        match: Match,
        prefills: Sequence[Peer],
        decodes: Sequence[Peer],
        now: float,
    ) -> _Plan:
        layout, prompt = team.layout, request.prompt_tokens
        by_node = {p.ref.node: p for p in (*prefills, *decodes)}
        decoders = [self._decoder(p, team, match, now) for p in decodes]
        rule = self._inline if prefills else InlineRule(max_tokens=prompt)
        inline_ttft_s, inliner = min(
            ((rule.ttft_s(d, prompt, layout.block_tokens), d) for d in decoders),
            key=lambda option: option[0],
            default=(float("inf"), None),
        )
        if not prefills:
            assert inliner is not None
            return self._inlined(by_node[inliner.ref.node], inliner, inline_ttft_s, prompt)
        choice = self._choose(request, team, match, prefills, now)
        decoder, handoff_s = None, 0.0
        if request.max_new_tokens > 1:
            decoder = choose_decoder(decoders, prompt, blocks_for(prompt + 1, layout.block_tokens))
            handoff_s = self._config.links.transfer_s(
                prompt * layout.token_bytes, decoder.host == choice.candidate.host
            )
        if inliner is not None and inline_ttft_s < choice.ttft_s + handoff_s:
            return self._inlined(by_node[inliner.ref.node], inliner, inline_ttft_s, prompt)
        return _Plan(
            prefill=by_node[choice.candidate.ref.node],
            decode=by_node[decoder.ref.node] if decoder else None,
            cached_blocks=choice.cached_blocks,
            remote=choice.remote,
            predicted=Prediction(
                queue_s=choice.queue_s,
                transfer_s=choice.transfer_s,
                prefill_s=choice.prefill_s,
                ttft_s=choice.ttft_s,
                tbt_s=predicted_tbt_s(decoder, prompt) if decoder else 0.0,
            ),
            reason=choice.reason,
        )

    def _choose(
        self, request: PlaceRequest, team: Team, match: Match, prefills: Sequence[Peer], now: float
    ) -> Choice:
        best, holder = best_cache(match, self._roster.caches)
        view = PlaceView(
            prompt_tokens=request.prompt_tokens,
            block_tokens=team.layout.block_tokens,
            block_bytes=team.layout.block_bytes,
            candidates=tuple(
                Candidate(
                    ref=p.ref,
                    host=p.host,
                    cost=p.cost(self._config.prior),
                    queue_s=p.book.queue_s(now),
                    assigned=p.book.requests(now),
                    local_blocks=self._local_blocks(p, match),
                )
                for p in prefills
            ),
            best_blocks=best,
            best_host=holder.host if holder else "",
            links=self._config.links,
            number=self._number,
        )
        self._number += 1
        return self._policy.place(view)

    def _decoder(self, peer: Peer, team: Team, match: Match, now: float) -> Decoder:
        book, info = peer.book, peer.member.info
        return Decoder(
            ref=peer.ref,
            host=peer.host,
            cost=peer.cost(self._config.prior),
            requests=book.requests(now),
            kv_tokens=book.kv_tokens(now),
            free_blocks=book.free_blocks(now, info.kv_blocks, team.layout.block_tokens),
            local_blocks=self._local_blocks(peer, match),
        )

    def _local_blocks(self, peer: Peer, match: Match) -> int:
        nodes = [peer.ref.node]
        nodes += [c.ref.node for c in self._roster.caches_on.get(peer.host, ())]
        return match.run_of_any(nodes)

    def _inlined(self, peer: Peer, decoder: Decoder, ttft_s: float, prompt_tokens: int) -> _Plan:
        return _Plan(
            prefill=None,
            decode=peer,
            cached_blocks=decoder.local_blocks,
            remote=False,
            predicted=Prediction(
                prefill_s=ttft_s, ttft_s=ttft_s, tbt_s=predicted_tbt_s(decoder, prompt_tokens)
            ),
            reason=f"prefilled where it is decoded: {decoder.local_blocks} blocks cached, little left to compute",
        )

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _admit(
        self,
        request: PlaceRequest,
        plan: _Plan,
        prefills: Sequence[Peer],
        decodes: Sequence[Peer],
        now: float,
    ) -> None:
        limits = self._config.objectives
        if not (limits.ttft_s or limits.tbt_s):
            return
        used = [p for p in (plan.prefill, plan.decode) if p is not None]
        idle = all(any(not p.book.requests(now) for p in peers) for peers in (prefills, decodes) if peers)
        refusal = self.admission.judge(
            Outlook(
                ttft_s=plan.predicted.ttft_s,
                tbt_s=plan.predicted.tbt_s,
                queue_s=plan.predicted.queue_s,
                decoding=plan.decode.book.requests(now) if plan.decode else 0,
                samples=min(p.samples for p in used),
                idle=idle,
            ),
            retry=request.retry,
        )
        if refusal is not None:
            raise Overloaded(refusal.reason, retry_after_s=refusal.retry_after_s)

    def _assign(self, request: PlaceRequest, plan: _Plan, now: float) -> None:
        work_s = plan.predicted.transfer_s + plan.predicted.prefill_s
        for peer, seconds in ((plan.prefill, work_s), (plan.decode, 0.0)):
            if peer is not None:
                peer.book.assigned(request.attempt, now, seconds, request.prompt_tokens)
                self._turn += 1
                peer.turn = self._turn

    def _placement(self, request: PlaceRequest, plan: _Plan, match: Match) -> Placement:
        prefiller = plan.prefill or plan.decode
        assert prefiller is not None
        near = self._roster.caches_on.get(prefiller.host, [])
        far = [c for c in self._roster.caches if c.host != prefiller.host] if plan.remote else []
        pool = pool_for(match, near, self._roster.caches)
        return Placement(
            attempt=request.attempt,
            prefill=_ref(plan.prefill),
            decode=_ref(plan.decode),
            sources=sources_for(match, prefiller, near, far, plan.cached_blocks),
            pool=_ref(pool),
            decode_pool=_ref(pool) if self._config.pool_answers else None,
            cached_blocks=plan.cached_blocks,
            predicted=plan.predicted,
            policy=self._config.policy,
            reason=plan.reason,
        )


def _full(peer: Peer, now: float) -> bool:
    info = peer.member.info
    if info.role == "prefill":
        return 0 < info.max_waiting <= peer.book.waiting(now)
    return info.max_running > 0 and peer.book.requests(now) >= info.max_running + info.max_waiting


def _ref(peer: Peer | None) -> NodeRef | None:
    return peer.ref if peer is not None else None
