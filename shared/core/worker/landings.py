"""KV that comes to a decode node from elsewhere: each landing into reserved pages, under a lease.

    open -> arrived (verified)
         -> failed, closed, lapsed -> the attempt is moved

Pages that a remote writer may still write to are given to nobody before the landing is closed.
"""

from __future__ import annotations

from shared.core.kv.block_keys import blocks_for
from shared.core.worker.attempts import AttemptTable
from shared.core.worker.config import DecodeConfig
from shared.core.worker.decode_sequence import DecodeSequence, landing_id
from shared.core.worker.leases import Timers
from shared.core.worker.outbox import Outbox
from shared.core.worker.transfers import (
    CloseLanding,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    LandingProgressed,
    OpenLanding,
)


class Landings:
    """The landings of one decode machine. The lease of one that nobody renews ends its attempt."""

    def __init__(self, config: DecodeConfig, out: Outbox, table: AttemptTable[DecodeSequence]) -> None:
        self._config = config
        self._out = out
        self._table = table
        self._timers = Timers()
        self._opened = 0

    def open(self, sequence: DecodeSequence, now: float) -> None:
        """Let a writer write the prompt's KV into the sequence's pages."""
        config = self._config
        self._opened += 1
        sequence.landing = landing_id(config.incarnation, sequence.attempt, self._opened)
        sequence.landing_open = True
        sequence.lease_s = max(config.reservation_lease_s, sequence.request.budget_s)
        self.renew(sequence, now)
        prompt_blocks = blocks_for(sequence.prompt_tokens, config.block_tokens)
        pages = tuple(sequence.pages[:prompt_blocks])
        self._out.commands.append(OpenLanding(sequence.attempt, sequence.landing, pages))

    def close(self, sequence: DecodeSequence) -> None:
        """Of an ended sequence: its pages are free once that has happened. Idempotent."""
        if not sequence.landing_closing:
            sequence.landing_closing = True
            self._out.commands.append(CloseLanding(sequence.attempt, sequence.landing))

    # -- how it ends -----------------------------------------------------------------------------------------------

    def over(self, event: LandingArrived | LandingFailed | LandingClosed) -> DecodeSequence | None:
        """The sequence whose landing is over now; None if that is no news. Frees the pages of one that has ended."""
        sequence = self._table.known.get(event.attempt)
        if sequence is None or not sequence.landing_open:
            self._table.late()
            return None
        sequence.landing_open = False
        if sequence.ended:
            self._table.free_if_quiet(sequence)
            return None
        return sequence

    def failed(self, event: LandingFailed, now: float) -> None:
        sequence = self.over(event)
        if sequence is not None:
            self._table.counters["landings_failed"] += 1
            self._table.end(sequence, now, "moved", event.error or "the KV did not arrive whole")

    def closed(self, event: LandingClosed, now: float) -> None:
        sequence = self.over(event)
        if sequence is not None:
            self._table.end(sequence, now, "moved", "the landing was closed")

    # -- leases ----------------------------------------------------------------------------------------------------

    def progressed(self, event: LandingProgressed, now: float) -> None:
        sequence = self._table.live.get(event.attempt)
        if sequence is not None and sequence.landing_open:
            sequence.lease_s = self._config.reservation_lease_s
            self.renew(sequence, now)

    def renew(self, sequence: DecodeSequence, now: float) -> None:
        """The sequence is still wanted. No-op if it waits for no KV."""
        if sequence.landing_open:
            sequence.lease_until = now + sequence.lease_s
            if sequence.lease_until < sequence.timer_at:
                self._set_timer(sequence)

    def ticked(self, now: float) -> None:
        for attempt in self._timers.due(now):
            sequence = self._table.live.get(attempt)
            if sequence is None or not sequence.landing_open or now < sequence.timer_at:
                continue
            if now >= sequence.lease_until:
                self._table.end(sequence, now, "moved", "the reservation lapsed")
            else:
                self._set_timer(sequence)

    def _set_timer(self, sequence: DecodeSequence) -> None:
        sequence.timer_at = sequence.lease_until
        self._timers.set(sequence.timer_at, sequence.attempt)

    def check(self) -> None:
        for attempt, s in self._table.live.items():
            assert s.landing_open == (attempt in self._table.waiting), (
                f"{attempt} neither lands nor runs, or both"
            )
        for attempt, s in self._table.known.items():
            assert not (s.landing_open and s.in_step), f"{attempt} is computed on KV that has not landed"
