"""Attempts that live on a node: from acceptance to their end, and on until nothing touches their pages any more.

    accepted -> waiting -> active -> (handing over) -> ended -> quiet: pages free, forgotten
                   \\________\\____________\\_______________^

Owned by gateways under a lease; asked about, cancelled, given up when the node drains. Pages are freed only when no
step, fetch or stream touches them (`SequenceState.quiet`).
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from shared.core.kv.pool import BlockPool
from shared.core.machine import Ticked
from shared.core.worker import events as w
from shared.core.worker.answers import Answer, EndedAnswers
from shared.core.worker.config import COUNTERS, WorkerConfig
from shared.core.worker.leases import GatewayLeases
from shared.core.worker.outbox import Outbox
from shared.core.worker.sequence import SequenceState
from shared.core.worker.transfers import PoolWriteEnded
from shared.protocol.errors import Cancelled, TsukimiError, Unavailable
from shared.protocol.ids import AttemptId
from shared.protocol.requests import AttemptState, FinishReason, PrefillJob, ReserveRequest, TokenDelta

S = TypeVar("S", bound=SequenceState)
S_contra = TypeVar("S_contra", bound=SequenceState, contravariant=True)


class Keeper(Protocol[S_contra]):
    """The machine that has the table."""

    def retired(self, sequence: S_contra) -> None:
        """The sequence has ended and is live no more."""

    def close(self, sequence: S_contra, now: float) -> None:
        """Commit or abort what an ended sequence has open. Idempotent."""

    def give_up(self, sequence: S_contra, now: float, why: str) -> None:
        """End a live sequence so that another node goes on with it."""


class AttemptTable(Generic[S]):
    """Knows every attempt of one machine, counts them, and gives each accepted one exactly one end."""

    def __init__(self, worker: WorkerConfig, pool: BlockPool, out: Outbox, keeper: Keeper[S]) -> None:
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.known: dict[AttemptId, S] = {}
        self.live: dict[AttemptId, S] = {}
        """Known ones that have not ended, oldest first."""
        self.waiting: dict[AttemptId, S] = {}
        """Live ones that wait for pages, or for KV from another node."""
        self.active: dict[AttemptId, S] = {}
        """Live ones that have pages and something to compute, in the order they came."""
        self.tokens = 0
        """Known tokens of all live ones."""
        self.ended_answers = EndedAnswers(worker.remember_s, worker.remember_attempts)
        self.leases = GatewayLeases(worker.gateway_lease_s)
        self.drain_deadline: float | None = None
        """By when all must have ended; None: the node does not drain."""
        self.turnover = 0
        """How often `attempts` changed."""
        self._attempts: tuple[AttemptId, ...] | None = None
        self._worker = worker
        self._pool = pool
        self._out = out
        self._keeper = keeper

    def attempts(self) -> tuple[AttemptId, ...]:
        """All that were accepted and have not ended."""
        if self._attempts is None:
            self._attempts = tuple(self.live)
        return self._attempts

    # -- coming in -------------------------------------------------------------------------------------------------

    def admit_owner(self, request: PrefillJob | ReserveRequest, now: float) -> TsukimiError | None:
        """Put a new attempt under its gateway's lease, or say why it can't come in."""
        if self.drain_deadline is not None:
            return Unavailable(f"{self._worker.node} is shutting down")
        past = self.ended_answers.get(request.attempt)
        if past is not None and not past.started:
            return Cancelled("this attempt was cancelled before it came")
        if past is not None or request.attempt in self.known:
            return Unavailable("this attempt has ended here")
        self._orphan(self.leases.seen(request.gateway, request.gateway_incarnation, now), now)
        if not self.leases.hold(request.gateway, request.gateway_incarnation, request.attempt, now):
            return Unavailable(f"{request.gateway} was restarted")
        return None

    def accept(self, sequence: S) -> None:
        """It waits at first."""
        attempt = sequence.attempt
        self.known[attempt] = self.live[attempt] = self.waiting[attempt] = sequence
        self.tokens += sequence.wanted
        self._attempts = None
        self.turnover += 1
        self.counters["accepted"] += 1

    def activate(self, sequence: S) -> None:
        del self.waiting[sequence.attempt]
        self.active[sequence.attempt] = sequence

    def refuse(self, ask: int, request: PrefillJob | ReserveRequest, error: TsukimiError) -> None:
        if request.attempt not in self.live:
            self.leases.drop(request.gateway, request.attempt)
        self.counters["refused"] += 1
        self._out.reply(ask, error.to_wire())

    def late(self) -> None:
        """An event came for what is over."""
        self.counters["late_ignored"] += 1

    # -- ending ----------------------------------------------------------------------------------------------------

    def end(
        self,
        sequence: S,
        now: float,
        finish: FinishReason | None = None,
        error: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        """The attempt is over: tell its gateway (unless a delta with the finish is on its way, or it is gone), and free
        its pages as soon as nothing touches them."""
        if finish is not None and sequence.answer.finish is None:
            self._tell_end(sequence, finish, error, retry_after_s)
        self.counters[f"ended_{sequence.answer.finish or 'quietly'}"] += 1
        self._retire(sequence, now)

    def move(self, sequence: S, now: float, why: str) -> None:
        """The attempt is over here and goes on at another node: its gateway is told once its pool write has ended, so
        that the next node finds the blocks."""
        self.counters["ended_moved"] += 1
        sequence.farewell = why
        self._retire(sequence, now)

    def close(self, sequence: S, now: float) -> None:
        """End what still touches the pages of an ended sequence that no step computes any more."""
        self._keeper.close(sequence, now)
        if sequence.farewell and not sequence.pool_open:
            self._say_farewell(sequence)
        self.free_if_quiet(sequence)

    def free_if_quiet(self, sequence: S) -> None:
        if sequence.ended and sequence.quiet:
            self._pool.unpin(sequence.pages)
            sequence.pages = []
            del self.known[sequence.attempt]

    def pool_write_ended(self, event: PoolWriteEnded, now: float) -> None:
        sequence = self.known.get(event.attempt)
        if sequence is None or not sequence.pool_open:
            self.late()
            return
        sequence.pool_open = False
        self.counters["blocks_pooled"] += event.stored
        if event.error:
            self.counters["pool_writes_failed"] += 1
        if sequence.farewell:
            self._say_farewell(sequence)
        self.free_if_quiet(sequence)

    def _tell_end(self, sequence: S, finish: FinishReason, error: str, retry_after_s: float = 0.0) -> None:
        answer = sequence.answer
        answer.finish, answer.error, answer.retry_after_s = finish, error, retry_after_s
        delta = sequence.held_back() if sequence.unsent >= 0 else None
        if delta is None:
            index = answer.first_index + len(answer.tokens)
            delta = TokenDelta(sequence.attempt, index, (), (), finish, error, None, retry_after_s)
        self._out.send(sequence.gateway, delta)

    def _say_farewell(self, sequence: S) -> None:
        why, sequence.farewell = sequence.farewell, ""
        self._tell_end(sequence, "moved", why)

    def _retire(self, sequence: S, now: float) -> None:
        attempt = sequence.attempt
        sequence.ended = True
        self.tokens -= sequence.wanted
        del self.live[attempt]
        self.waiting.pop(attempt, None)
        self.active.pop(attempt, None)
        self._attempts = None
        self.turnover += 1
        self._keeper.retired(sequence)
        self.leases.drop(sequence.gateway, attempt)
        if sequence.unwritten:
            sequence.flush()
        self.ended_answers.remember(attempt, sequence.answer, now)
        if not sequence.in_step:
            self.close(sequence, now)

    # -- owners ----------------------------------------------------------------------------------------------------

    def cancelled(self, event: w.AttemptCancelled, now: float) -> None:
        sequence = self.live.get(event.attempt)
        if sequence is not None:
            self.end(sequence, now)
        elif event.attempt not in self.known and self.ended_answers.get(event.attempt) is None:
            self.late()
            self.ended_answers.remember(event.attempt, Answer(started=False), now)

    def sync_asked(self, event: w.SyncAsked, now: float) -> None:
        self._out.reply(event.ask, self._state(event.attempt, event.from_index))

    def _state(self, attempt: AttemptId, from_index: int) -> AttemptState:
        """One that has ended runs on for its gateway until the farewell is said."""
        sequence = self.known.get(attempt)
        if sequence is not None and (attempt in self.live or sequence.farewell):
            sequence.flush()
            begun = bool(sequence.answer.tokens) or attempt in self.active
            return sequence.answer.state(attempt, "running" if begun else "waiting", from_index)
        past = sequence.answer if sequence is not None else self.ended_answers.get(attempt)
        if past is None or not past.started:
            return AttemptState(attempt, "unknown")
        return past.state(attempt, "finished", from_index)

    def gateway_seen(self, event: w.GatewaySeen, now: float) -> None:
        self._orphan(self.leases.seen(event.node, event.incarnation, now), now)

    def _orphan(self, attempts: list[AttemptId], now: float) -> None:
        for attempt in attempts:
            sequence = self.live.get(attempt)
            if sequence is not None:
                self.counters["orphaned"] += 1
                self.end(sequence, now)

    # -- time and drain --------------------------------------------------------------------------------------------

    def ticked(self, event: Ticked, now: float) -> None:
        self._orphan(self.leases.lapsed(now), now)
        self.ended_answers.expire(now)
        if self.drain_deadline is not None and now >= self.drain_deadline:
            for sequence in list(self.live.values()):
                self._keeper.give_up(sequence, now, "shutting down")

    def drain_started(self, event: w.DrainStarted, now: float) -> None:
        deadline = now + event.grace_s
        self.drain_deadline = deadline if self.drain_deadline is None else min(deadline, self.drain_deadline)
