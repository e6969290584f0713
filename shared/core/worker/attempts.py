"""Attempts that live on a node: from acceptance to their end, and on until nothing touches their pages any more.

Owned by gateways under a lease; asked about, cancelled, given up when the node drains. Pages are freed only when no
step, fetch or stream touches them (`SequenceState.quiet`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.core.kv.eviction import POLICIES
from shared.core.kv.pool import BlockPool
from shared.core.machine import BusFound, BusLost, Ticked
from shared.core.worker import events as w
from shared.core.worker.answers import Answer, EndedAnswers
from shared.core.worker.config import COUNTERS, WorkerConfig
from shared.core.worker.leases import GatewayLeases
from shared.core.worker.sequence import SequenceState
from shared.core.worker.transfers import PoolWriteEnded
from shared.protocol.errors import Cancelled, TsukimiError, Unavailable
from shared.protocol.ids import AttemptId, NodeId
from shared.protocol.requests import AttemptState, FinishReason, PrefillJob, ReserveRequest, TokenDelta

S = TypeVar("S", bound=SequenceState)


class AttemptTable(ABC, Generic[S]):
    """A machine's bookkeeping of attempts. `handle` alone mutates it."""

    def __init__(self, worker: WorkerConfig) -> None:
        self.worker = worker
        self.pool = BlockPool(worker.pages, POLICIES[worker.eviction], keep=worker.keep_blocks)
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._known: dict[AttemptId, S] = {}
        self._live: dict[AttemptId, S] = {}
        """Known ones that have not ended, oldest first."""
        self._ended_answers = EndedAnswers(worker.remember_s, worker.remember_attempts)
        self._leases = GatewayLeases(worker.gateway_lease_s)
        self._timers: list[tuple[float, int, AttemptId]] = []
        self._timer_count = 0
        self._blocks_seq = 0
        self._drain_deadline: float | None = None
        self._drained = False
        self._commands: list[Any] = []
        self._outbox: dict[NodeId, list[TokenDelta]] = {}
        self._attempts: tuple[AttemptId, ...] | None = None
        self.turnover = 0
        """How often `attempts` changed."""
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            PoolWriteEnded: self._on_pool_write_ended,
            w.AttemptCancelled: self._on_cancelled,
            w.SyncAsked: self._on_sync_asked,
            w.GatewaySeen: self._on_gateway_seen,
            BusLost: lambda event, now: self._leases.freeze(),
            BusFound: lambda event, now: self._leases.thaw(now),
            SnapshotWanted: self._on_snapshot_wanted,
            w.DrainStarted: self._on_drain_started,
            Ticked: self._on_ticked,
        }

    def handle(self, event: Any, now: float) -> list[Any]:
        """Commands in order; tokens go out first."""
        commands: list[Any] = []
        self._commands = commands
        self._handlers[type(event)](event, now)
        self._advance(now)
        if self.pool.keeps and self.pool.changed:
            self._publish_blocks()
        if self._outbox:
            commands[:0] = [w.SendTokens(gateway, tuple(deltas)) for gateway, deltas in self._outbox.items()]
            self._outbox = {}
        if self._drain_deadline is not None and not self._known and not self._drained:
            self._drained = True
            commands.append(w.Drained())
        self._commands = []  # those are the shell's now: carried out, they go while they are still at hand
        return commands

    @property
    def draining(self) -> bool:
        return self._drain_deadline is not None

    def attempts(self) -> tuple[AttemptId, ...]:
        """All that were accepted and have not ended."""
        if self._attempts is None:
            self._attempts = tuple(self._live)
        return self._attempts

    # -- coming in -------------------------------------------------------------------------------------------------

    def _admit_owner(self, request: PrefillJob | ReserveRequest, now: float) -> TsukimiError | None:
        """Put a new attempt under its gateway's lease, or say why it can't come in."""
        if self.draining:
            return Unavailable(f"{self.worker.node} is shutting down")
        past = self._ended_answers.get(request.attempt)
        if past is not None and not past.started:
            return Cancelled("this attempt was cancelled before it came")
        if past is not None or request.attempt in self._known:
            return Unavailable("this attempt has ended here")
        self._orphan(self._leases.seen(request.gateway, request.gateway_incarnation, now), now)
        if not self._leases.hold(request.gateway, request.gateway_incarnation, request.attempt, now):
            return Unavailable(f"{request.gateway} was restarted")
        return None

    def _accept(self, sequence: S) -> None:
        self._known[sequence.attempt] = self._live[sequence.attempt] = sequence
        self._attempts = None
        self.turnover += 1
        self.counters["accepted"] += 1

    def _refuse(self, ask: int, request: PrefillJob | ReserveRequest, error: TsukimiError) -> None:
        if request.attempt not in self._live:
            self._leases.drop(request.gateway, request.attempt)
        self.counters["refused"] += 1
        self._commands.append(w.Reply(ask, error.to_wire()))

    def _set_timer(self, at: float, attempt: AttemptId) -> None:
        self._timer_count += 1
        heappush(self._timers, (at, self._timer_count, attempt))

    # -- ending ----------------------------------------------------------------------------------------------------

    def _end(self, sequence: S, now: float, finish: FinishReason | None = None, error: str = "") -> None:
        """The attempt is over: tell its gateway (unless a delta with the finish is on its way, or it is gone), and free
        its pages as soon as nothing touches them."""
        if finish is not None and sequence.answer.finish is None:
            self._farewell(sequence, finish, error)
        self.counters[f"ended_{sequence.answer.finish or 'quietly'}"] += 1
        self._retire(sequence, now)

    def _farewell(self, sequence: S, finish: FinishReason, error: str) -> None:
        answer = sequence.answer
        answer.finish, answer.error = finish, error
        delta = sequence.held_back() if sequence.unsent >= 0 else None
        if delta is None:
            index = answer.first_index + len(answer.tokens)
            delta = TokenDelta(sequence.attempt, index, (), (), finish, error)
        self._send(sequence.gateway, delta)

    def _retire(self, sequence: S, now: float) -> None:
        sequence.ended = True
        self._live.pop(sequence.attempt)
        self._attempts = None
        self.turnover += 1
        self._leases.drop(sequence.gateway, sequence.attempt)
        if sequence.unwritten:
            sequence.flush()
        self._ended_answers.remember(sequence.attempt, sequence.answer, now)
        if not sequence.in_step:
            self._close(sequence, now)

    def _close(self, sequence: S, now: float) -> None:
        """End what still touches the pages of an ended sequence that no step computes any more."""
        self._close_streams(sequence, now)
        self._free_if_quiet(sequence)

    def _free_if_quiet(self, sequence: S) -> None:
        if sequence.ended and sequence.quiet:
            self.pool.unpin(sequence.pages)
            sequence.pages = []
            del self._known[sequence.attempt]

    def _on_pool_write_ended(self, event: PoolWriteEnded, now: float) -> None:
        sequence = self._known.get(event.attempt)
        if sequence is None or not sequence.pool_open:
            self._late()
            return
        sequence.pool_open = False
        self.counters["blocks_pooled"] += event.stored
        if event.error:
            self.counters["pool_writes_failed"] += 1
        self._pool_written(sequence, now)
        self._free_if_quiet(sequence)

    def _pool_written(self, sequence: S, now: float) -> None:
        """A hook: the sequence's pool write is over."""

    # -- owners ----------------------------------------------------------------------------------------------------

    def _on_cancelled(self, event: w.AttemptCancelled, now: float) -> None:
        sequence = self._live.get(event.attempt)
        if sequence is not None:
            self._end(sequence, now)
        elif event.attempt not in self._known and self._ended_answers.get(event.attempt) is None:
            self._late()
            self._ended_answers.remember(event.attempt, Answer(started=False), now)

    def _on_sync_asked(self, event: w.SyncAsked, now: float) -> None:
        self._commands.append(w.Reply(event.ask, self._state(event.attempt, event.from_index)))
        sequence = self._live.get(event.attempt)
        if sequence is not None:
            self._renew(sequence, now)

    def _state(self, attempt: AttemptId, from_index: int) -> AttemptState:
        sequence = self._known.get(attempt)
        if sequence is not None and (attempt in self._live or self._still_open(sequence)):
            sequence.flush()
            waiting = not self._begun(sequence)
            return sequence.answer.state(attempt, "waiting" if waiting else "running", from_index)
        past = sequence.answer if sequence is not None else self._ended_answers.get(attempt)
        if past is None or not past.started:
            return AttemptState(attempt, "unknown")
        return past.state(attempt, "finished", from_index)

    def _still_open(self, sequence: S) -> bool:
        """Ended, but its gateway has not been told yet."""
        return False

    def _renew(self, sequence: S, now: float) -> None:
        """The owner asked for the sequence: it is still wanted."""

    def _on_gateway_seen(self, event: w.GatewaySeen, now: float) -> None:
        self._orphan(self._leases.seen(event.node, event.incarnation, now), now)

    def _orphan(self, attempts: list[AttemptId], now: float) -> None:
        for attempt in attempts:
            sequence = self._live.get(attempt)
            if sequence is not None:
                self.counters["orphaned"] += 1
                self._end(sequence, now)

    def _send(self, gateway: NodeId, delta: TokenDelta) -> None:
        box = self._outbox.get(gateway)
        if box is None:
            self._outbox[gateway] = [delta]
        else:
            box.append(delta)

    def _late(self) -> None:
        self.counters["late_ignored"] += 1

    # -- time, drain, index ----------------------------------------------------------------------------------------

    def _on_ticked(self, event: Ticked, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            attempt = heappop(self._timers)[2]
            sequence = self._live.get(attempt)
            if sequence is not None:
                self._timer_fired(sequence, now)
        self._orphan(self._leases.lapsed(now), now)
        self._ended_answers.expire(now)
        if self._drain_deadline is not None and now >= self._drain_deadline:
            for sequence in list(self._live.values()):
                self._give_up(sequence, now, "shutting down")

    def _timer_fired(self, sequence: S, now: float) -> None:
        """A timer of a live sequence went off (maybe one that no longer matters)."""

    def _on_drain_started(self, event: w.DrainStarted, now: float) -> None:
        deadline = now + event.grace_s
        self._drain_deadline = (
            deadline if self._drain_deadline is None else min(deadline, self._drain_deadline)
        )

    def _give_up(self, sequence: S, now: float, why: str) -> None:
        """Let another node go on with it."""
        self._end(sequence, now, "moved", why)

    def _publish_blocks(self) -> None:
        stored, removed = self.pool.take_changes()
        self._blocks_seq += 1
        self._commands.append(PublishBlocks(self._blocks_seq, stored, removed))

    def _on_snapshot_wanted(self, event: SnapshotWanted, now: float) -> None:
        self._commands.append(PublishSnapshot(self._blocks_seq, self.pool.keys()))

    # -- laws and hooks --------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.pool.check()
        held = Counter(page for s in self._known.values() for page in s.pages)
        for page in range(self.pool.total):
            refs = self.pool.refs_of(page)
            assert refs == held[page], f"page {page} is held {refs} times, known of are {held[page]}"
        for attempt, s in self._known.items():
            assert s.ended == (attempt not in self._live), f"{attempt}: ended is {s.ended}"
            assert not (s.ended and s.quiet), f"{attempt} has ended, is quiet and was not forgotten"
            assert s.computed <= s.wanted, f"{attempt}: {s.computed} computed of {s.wanted}"
            room = len(s.pages) * self.worker.block_tokens
            assert s.ended or s.computed <= room, f"{attempt}: {s.computed} computed in room for {room}"
        assert set(self._live) <= set(self._known)
        assert self._leases.attempts() == set(self._live), "leases and live attempts differ"
        ended = sum(v for name, v in self.counters.items() if name.startswith("ended_"))
        assert self.counters["accepted"] == ended + len(self._live), "accepted attempts were lost"
        assert len(self._ended_answers) <= self.worker.remember_attempts

    @abstractmethod
    def _advance(self, now: float) -> None:
        """After every event: start what can be started."""

    @abstractmethod
    def _begun(self, sequence: S) -> bool:
        """Whether a live sequence is running, not waiting."""

    @abstractmethod
    def _close_streams(self, sequence: S, now: float) -> None:
        """Commit or abort what an ended sequence has open. Idempotent."""
