"""The decode role: room first, then KV from a prefill node (or prefilled here), then a token a step until the end.

reserved -> landed (verified) -> in the batch -> ended -> full blocks to the pool -> pages free
         -> prefix fetched, chunks computed (local prefill) ---^

DecodeMachine has, besides what every WorkerMachine has,
    Reservations   who gets a place
    Landings       whose KV is awaited from a prefill node
"""

from __future__ import annotations

from shared.core.machine import Ticked
from shared.core.worker import events as w
from shared.core.worker.computing.prefix import key_blocks
from shared.core.worker.config import DecodeConfig
from shared.core.worker.decode_sequence import DecodeSequence, keep_blocks, same_request
from shared.core.worker.landings import Landings
from shared.core.worker.machine import WorkerMachine
from shared.core.worker.reservations import Reservations
from shared.core.worker.transfers import LandingArrived, LandingClosed, LandingFailed, LandingProgressed
from shared.protocol.errors import Invalid, retry_within_reason
from shared.protocol.requests import Reserved, TokenDelta


class DecodeMachine(WorkerMachine[DecodeSequence]):
    """See core.machine.Machine. Never decodes on KV that was not verified whole, never takes in what it has no pages
    for. Each reserved attempt gets exactly one ending: a delta with its finish, or silence when cancelled."""

    role = "decode"
    cost_kind = "step"

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.config = config
        self._reservations = Reservations(config, self.pool, self._table, self._predictions)
        self._landings = Landings(config, self._out, self._table)
        self._active = self._table.active
        self._inflight = self._computation.inflight
        self._stalled = False
        """Some sequence has no page for its next token."""
        self._handlers |= {
            w.ReserveAsked: self._on_reserve_asked,
            w.SyncAsked: self._on_sync_asked,
            LandingArrived: self._on_landing_arrived,
            LandingFailed: self._landings.failed,
            LandingClosed: self._landings.closed,
            LandingProgressed: self._landings.progressed,
            Ticked: self._on_ticked,
        }

    # -- coming in -------------------------------------------------------------------------------------------------

    def _on_reserve_asked(self, event: w.ReserveAsked, now: float) -> None:
        """Asked again, the answer is the same."""
        request = event.request
        sequence = self._table.live.get(request.attempt)
        if sequence is None:
            sequence = self._reservations.reserve(event, now)
            if sequence is None:
                return
            if sequence.local:
                self._computation.begin(sequence, now)
            else:
                self._landings.open(sequence, now)
        elif same_request(sequence.request, request):
            self._landings.renew(sequence, now)
        else:
            error = Invalid("this attempt is reserved for another request", param="attempt")
            self._table.refuse(event.ask, request, error)
            return
        self._out.reply(event.ask, Reserved(sequence.attempt, sequence.landing, len(sequence.pages)))

    def _on_landing_arrived(self, event: LandingArrived, now: float) -> None:
        sequence = self._landings.over(event)
        if sequence is None:
            return
        sequence.computed = sequence.prompt_tokens
        sequence.answer.cached_tokens = min(max(0, event.cached_tokens), sequence.prompt_tokens - 1)
        key_blocks(self.pool, sequence, self.worker.block_tokens)
        logprobs = (event.first_logprob,) if event.first_logprob is not None else ()
        delta = sequence.take((event.first_token,), logprobs)
        assert delta is not None
        self._table.tokens += 1
        if delta.finish is not None:
            self._out.send(sequence.gateway, delta)
            self._table.end(sequence, now)
        elif self._reservations.too_slow(sequence.request):
            wait_s = retry_within_reason(self._reservations.room_in_s())
            self._table.end(sequence, now, "refused", "steps would become too long", wait_s)
        else:
            self._table.activate(sequence)
            self._computation.changed = True
            if sequence.request.tbt_limit_s:
                self._out.send(sequence.gateway, TokenDelta(sequence.attempt, delta.index + 1))

    def _on_sync_asked(self, event: w.SyncAsked, now: float) -> None:
        """Who asks for a sequence still wants it."""
        self._table.sync_asked(event, now)
        sequence = self._table.live.get(event.attempt)
        if sequence is not None:
            self._landings.renew(sequence, now)

    def _on_ticked(self, event: Ticked, now: float) -> None:
        self._landings.ticked(now)
        self._table.ticked(event, now)

    # -- stepping --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        inflight, computation = self._inflight, self._computation
        out = inflight.out
        if out is None:
            if self._active and not self._run_on():
                self._run_planned(now)
            out = inflight.out
            if out is None:
                return
        changed, computation.changed = computation.changed, False
        if changed and (len(out) < self.config.max_running or any(s.ended for s, _ in out)):
            interrupt = inflight.interrupt()
            if interrupt is not None:
                self._out.commands.append(interrupt)

    def _run_on(self) -> bool:
        """Launch the next step of a batch that only decodes: nearly always. False: there is more to think of."""
        config = self.config
        if len(self._active) > config.max_running or self._inflight.suspecting:
            return False
        step = self._inflight.launch_decoding(self._active.values(), config.block_tokens, config.max_repeat)
        if step is None:
            return False
        self._computation.changed = self._stalled = False
        self._out.commands.append(step)
        return True

    def _run_planned(self, now: float) -> None:
        """Launch a step of those that have room for it, if there are any."""
        computation = self._computation
        ready = computation.ready()
        if not ready:
            return
        plan, _ = computation.plan(self._with_room(ready, now))
        if plan:
            computation.changed = False
            up_to = self._repeats(plan) if self.config.max_repeat > 1 else 1
            computation.launch(plan, now, up_to)

    def _repeats(self, plan: list[tuple[DecodeSequence, int]]) -> int:
        """How many steps may run before anything has to change."""
        if self._stalled or [s for s, _ in plan if s.computed < s.prompt_tokens]:
            return 1
        block_tokens = self.worker.block_tokens
        wanted = min([s.prompt_tokens + s.max_new_tokens - s.wanted for s, _ in plan])
        room = min([len(s.pages) * block_tokens - s.computed for s, _ in plan])
        return min(wanted, room, self.config.max_repeat)

    # -- room for the next token -----------------------------------------------------------------------------------

    def _with_room(self, ready: list[DecodeSequence], now: float) -> list[DecodeSequence]:
        """As many of the first ones as one step runs."""
        self._stalled = False
        rows: list[DecodeSequence] = []
        for sequence in ready:
            if len(rows) >= self.config.max_running:
                break
            if not sequence.ended and self._has_room(sequence, now):
                rows.append(sequence)
        return [s for s in rows if not s.ended]

    def _has_room(self, sequence: DecodeSequence, now: float) -> bool:
        """A page for its next token; if need be, a sequence gives way: of those that have moved least, the youngest. So
        nobody is moved again and again."""
        while sequence.decoding and sequence.computed >= len(sequence.pages) * self.worker.block_tokens:
            page = self.pool.allocate(1)
            if page is not None:
                sequence.pages += page
            elif not self._make_way(sequence, now):
                self._stalled = True
                return False
        return True

    def _make_way(self, sequence: DecodeSequence, now: float) -> bool:
        """Whether it is worth asking for a page again at once."""
        table = self._table
        if len(table.known) > len(table.live):
            return False  # pages of ended ones come soon
        if len(table.live) == 1:  # another node may hold more; where none does, its owner ends the answer
            self.give_up(sequence, now, f"{self.worker.node} has no KV memory for a sequence of this length")
            return False
        self.counters["preempted"] += 1
        victim = min(reversed(table.live.values()), key=lambda s: s.request.moves)
        self.give_up(victim, now, "gave way: out of KV blocks")
        return victim is not sequence

    # -- ending ----------------------------------------------------------------------------------------------------

    def sampled(self, sequence: DecodeSequence, delta: TokenDelta, now: float) -> None:
        if delta.finish is not None:
            self._table.end(sequence, now)

    def give_up(self, sequence: DecodeSequence, now: float, why: str) -> None:
        """Its blocks go to the pool before its gateway places it anew, so that the next node finds them."""
        self._table.move(sequence, now, why)

    def close(self, sequence: DecodeSequence, now: float) -> None:
        if sequence.landing_open:
            self._landings.close(sequence)
        elif sequence.fetching < 0 and not sequence.kept and sequence.answer.finish != "failed":
            sequence.kept = True
            self._out.commands += keep_blocks(self.pool, sequence, self.worker)

    def check(self) -> None:
        super().check()
        assert len(self._table.live) == len(self._table.waiting) + len(self._active), "somebody is lost"
        self._landings.check()
