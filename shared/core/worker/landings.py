"""The first half of the decode role: places are reserved, and KV lands in them or is waited for.

    asked -> reserved (pages, a landing under a lease) -> landed, verified -> active
                                                       -> failed, closed, lapsed -> moved
          -> reserved (pages) -> active at once: its prompt is computed here (local prefill)

Pages that a remote writer may still write to are given to nobody before the landing is closed.
"""

from __future__ import annotations

from shared.core.costs.model import step_s
from shared.core.kv.block_keys import blocks_for
from shared.core.worker import events as w
from shared.core.worker.config import DecodeConfig
from shared.core.worker.decode_sequence import DecodeSequence, landing_id, same_request
from shared.core.worker.machine import WorkerMachine
from shared.core.worker.prefix import key_blocks, take_pages
from shared.core.worker.transfers import (
    CloseLanding,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    LandingProgressed,
    OpenLanding,
)
from shared.core.worker.validation import bad_past, bad_tail, bad_tokens, misfit, never_fits, overloaded
from shared.protocol.errors import Invalid, TsukimiError
from shared.protocol.requests import Reserved, ReserveRequest

RETRY_GUESS_S = 1.0


class ReservingMachine(WorkerMachine[DecodeSequence]):
    """What a decode machine does until a sequence is active."""

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.config = config
        self._landings = 0
        self._kv_tokens = 0
        """Known tokens of all live sequences."""
        self._newcomer = False
        """The step that is out could be joined, or left."""
        self._handlers |= {
            w.ReserveAsked: self._on_reserve_asked,
            LandingArrived: self._on_landing_arrived,
            LandingFailed: self._on_landing_failed,
            LandingClosed: self._on_landing_closed,
            LandingProgressed: self._on_landing_progressed,
        }

    # -- reserving -------------------------------------------------------------------------------------------------

    def _on_reserve_asked(self, event: w.ReserveAsked, now: float) -> None:
        request = event.request
        sequence = self._live.get(request.attempt)
        if sequence is not None and not same_request(sequence.request, request):
            self._refuse(
                event.ask, request, Invalid("this attempt is reserved for another request", param="attempt")
            )
            return
        if sequence is None:
            error = self._unfit(request) or self._admit_owner(request, now)
            sequence = DecodeSequence(request)
            if error is None and not self._take_room(sequence):
                error = overloaded(f"{self.worker.node} has no room", self._room_in_s())
            if error is not None:
                self._refuse(event.ask, request, error)
                return
            self._take_in(sequence, now)
        else:
            self._renew(sequence, now)
        self._commands.append(
            w.Reply(event.ask, Reserved(sequence.attempt, sequence.landing, len(sequence.pages)))
        )

    def _unfit(self, request: ReserveRequest) -> TsukimiError | None:
        config, prompt = self.config, request.prompt_tokens
        return (
            misfit(config, request, prompt)
            or (bad_tokens(config, request.local.tokens, prompt) if request.local else None)
            or (bad_tail(config, request) if config.token_ids else None)
            or bad_past(config, request)
            or never_fits(config, self._first_tokens(request))
        )

    def _first_tokens(self, request: ReserveRequest) -> int:
        """What is reserved at once. The last token's KV is never computed."""
        return request.prompt_tokens + min(request.max_new_tokens - 1, self.config.headroom_tokens)

    def _take_room(self, sequence: DecodeSequence) -> bool:
        """Pages for the prompt and some of its answer; a page for each that runs is left, so that they can go on."""
        config = self.config
        if len(self._live) >= config.max_running + config.max_waiting:
            return False
        blocks = blocks_for(self._first_tokens(sequence.request), config.block_tokens)
        if self._active and self.pool.available - blocks < len(self._active):
            return False
        if sequence.local:
            return take_pages(self.pool, sequence, blocks, config.block_tokens)
        pages = self.pool.allocate(blocks)
        sequence.pages = pages or []
        return pages is not None

    def _take_in(self, sequence: DecodeSequence, now: float) -> None:
        self._accept(sequence)
        self._kv_tokens += sequence.wanted
        if sequence.local:
            self._active[sequence.attempt] = sequence
            self._expect_prefill(sequence)
            self._fetch_more(sequence)
            return
        self._landings += 1
        sequence.landing = landing_id(self.worker.incarnation, sequence.attempt, self._landings)
        sequence.landing_open = True
        sequence.lease_s = max(self.config.reservation_lease_s, sequence.request.budget_s)
        self._renew(sequence, now)
        prompt_blocks = blocks_for(sequence.prompt_tokens, self.worker.block_tokens)
        self._commands.append(
            OpenLanding(sequence.attempt, sequence.landing, tuple(sequence.pages[:prompt_blocks]))
        )

    def _room_in_s(self) -> float:
        """When the next running sequence will have ended."""
        if not self._active:
            return RETRY_GUESS_S
        tokens = min(s.whole - s.wanted for s in self._active.values())
        return tokens * step_s(self.cost, len(self._active), self._kv_tokens)

    # -- landing ---------------------------------------------------------------------------------------------------

    def _landed(self, event: LandingArrived | LandingFailed | LandingClosed) -> DecodeSequence | None:
        """The sequence whose landing is over now; None if that is no news. Frees the pages of one that has ended."""
        sequence = self._known.get(event.attempt)
        if sequence is None or not sequence.landing_open:
            self._late()
            return None
        sequence.landing_open = False
        if sequence.ended:
            self._free_if_quiet(sequence)
            return None
        return sequence

    def _on_landing_arrived(self, event: LandingArrived, now: float) -> None:
        sequence = self._landed(event)
        if sequence is None:
            return
        sequence.computed = sequence.prompt_tokens
        sequence.answer.cached_tokens = min(max(0, event.cached_tokens), sequence.prompt_tokens - 1)
        key_blocks(self.pool, sequence, self.worker.block_tokens)
        delta = sequence.take(
            (event.first_token,), (event.first_logprob,) if event.first_logprob is not None else ()
        )
        assert delta is not None
        self._kv_tokens += 1
        if delta.finish is not None:
            self._send(sequence.gateway, delta)
            self._end(sequence, now)
            return
        limit = self.config.tbt_limit_s
        if limit and self._active and step_s(self.cost, len(self._active) + 1, self._kv_tokens) > limit:
            self._give_up(sequence, now, "steps would become too long")
            return
        self._active[sequence.attempt] = sequence
        self._newcomer = True

    def _on_landing_failed(self, event: LandingFailed, now: float) -> None:
        sequence = self._landed(event)
        if sequence is not None:
            self.counters["landings_failed"] += 1
            self._end(sequence, now, "moved", event.error or "the KV did not arrive whole")

    def _on_landing_closed(self, event: LandingClosed, now: float) -> None:
        sequence = self._landed(event)
        if sequence is not None:
            self._end(sequence, now, "moved", "the landing was closed")

    def _on_landing_progressed(self, event: LandingProgressed, now: float) -> None:
        sequence = self._live.get(event.attempt)
        if sequence is not None and sequence.landing_open:
            sequence.lease_s = self.config.reservation_lease_s
            self._renew(sequence, now)

    def _renew(self, sequence: DecodeSequence, now: float) -> None:
        if sequence.landing_open:
            sequence.lease_until = now + sequence.lease_s
            if sequence.lease_until < sequence.timer_at:
                self._set_lease_timer(sequence)

    def _set_lease_timer(self, sequence: DecodeSequence) -> None:
        sequence.timer_at = sequence.lease_until
        self._set_timer(sequence.timer_at, sequence.attempt)

    def _timer_fired(self, sequence: DecodeSequence, now: float) -> None:
        if not sequence.landing_open or now < sequence.timer_at:
            return
        if now >= sequence.lease_until:
            self._end(sequence, now, "moved", "the reservation lapsed")
        else:
            self._set_lease_timer(sequence)

    # -- becoming active -------------------------------------------------------------------------------------------

    def _fetch_more(self, sequence: DecodeSequence) -> None:
        super()._fetch_more(sequence)
        self._newcomer |= sequence.fetching < 0

    def _retire(self, sequence: DecodeSequence, now: float) -> None:
        self._kv_tokens -= sequence.wanted
        self._newcomer |= sequence.in_step
        super()._retire(sequence, now)

    def _close_landing(self, sequence: DecodeSequence) -> None:
        """Of an ended sequence: its pages are free once that has happened."""
        if not sequence.landing_closing:
            sequence.landing_closing = True
            self._commands.append(CloseLanding(sequence.attempt, sequence.landing))

    def check(self) -> None:
        super().check()
        wanted = sum(s.wanted for s in self._live.values())
        assert self._kv_tokens == wanted, f"{self._kv_tokens} KV tokens counted, {wanted} found"
        for attempt, s in self._live.items():
            assert (attempt in self._active) + s.landing_open == 1, (
                f"{attempt} neither lands nor runs, or both"
            )
        for attempt, s in self._known.items():
            assert not (s.landing_open and s.in_step), f"{attempt} is computed on KV that has not landed"
