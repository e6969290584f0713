"""What prefill and decode machines have in common: attempts on pages, computed in batched steps, reported as load.

WorkerMachine has   Outbox         commands of the event at hand
                    BlockPool      pages, and the blocks that are findable in them
                    AttemptTable   who is here, owned by whom, and how each ends
                    Predictions    what the work will take
                    Computation    prefixes, steps, tokens; has the InflightStep
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from shared.core.costs.model import Kind
from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.core.kv.eviction import POLICIES
from shared.core.kv.pool import BlockPool
from shared.core.machine import BusFound, BusLost, Ticked
from shared.core.worker import events as w
from shared.core.worker.attempts import AttemptTable
from shared.core.worker.computing.computation import Computation
from shared.core.worker.computing.predictions import Predictions
from shared.core.worker.config import WorkerConfig
from shared.core.worker.invariants import check_attempts, check_pages, check_step
from shared.core.worker.outbox import Outbox
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import StepDone, StepFailed
from shared.core.worker.transfers import BlocksFetched, PoolWriteEnded
from shared.protocol.cluster import CostCoefficients, NodeLoad, Stage
from shared.protocol.ids import AttemptId, Role
from shared.protocol.requests import TokenDelta

S = TypeVar("S", bound=SequenceState)


class WorkerMachine(ABC, Generic[S]):
    """One worker's state. `handle` alone mutates it; `load` may be asked at any time.

    A role adds its own events to `_handlers` and says, in four hooks, what runs next and what a token and an end mean.
    """

    role: ClassVar[Role]
    cost_kind: ClassVar[Kind]
    """Which of its measurements the node's time model stands on."""

    def __init__(self, worker: WorkerConfig) -> None:
        self.worker = worker
        self.pool = BlockPool(worker.pages, POLICIES[worker.eviction], keep=worker.keep_blocks)
        self._out = Outbox()
        self._table: AttemptTable[S] = AttemptTable(worker, self.pool, self._out, self)
        self._predictions = Predictions(worker, self.pool)
        self._computation: Computation[S] = Computation(
            worker, self.pool, self._out, self._table, self._predictions, self
        )
        self.counters = self._table.counters
        self._blocks_seq = 0
        self._drained = False
        table, computation = self._table, self._computation
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            StepDone: computation.step_done,
            StepFailed: computation.step_failed,
            BlocksFetched: computation.fetched,
            PoolWriteEnded: table.pool_write_ended,
            w.AttemptCancelled: table.cancelled,
            w.SyncAsked: table.sync_asked,
            w.GatewaySeen: table.gateway_seen,
            w.DrainStarted: table.drain_started,
            Ticked: table.ticked,
            BusLost: lambda event, now: table.leases.freeze(),
            BusFound: lambda event, now: table.leases.thaw(now),
            SnapshotWanted: self._on_snapshot_wanted,
        }

    def handle(self, event: Any, now: float) -> list[Any]:
        """Commands in order; tokens go out first."""
        out = self._out
        commands: list[Any] = []
        out.commands = commands
        self._handlers[type(event)](event, now)
        self._advance(now)
        if self.pool.keeps and self.pool.changed:
            self._publish_blocks()
        if out.tokens:
            out.put_tokens_first()
        if self._table.drain_deadline is not None and not self._table.known and not self._drained:
            self._drained = True
            commands.append(w.Drained())
        out.commands = []  # those are the shell's now: carried out, they go while they are still at hand
        return commands

    # -- hooks -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _advance(self, now: float) -> None:
        """After every event: start what can be started."""

    @abstractmethod
    def sampled(self, sequence: S, delta: TokenDelta, now: float) -> None:
        """See computation.Listener."""

    @abstractmethod
    def give_up(self, sequence: S, now: float, why: str) -> None:
        """See attempts.Keeper."""

    @abstractmethod
    def close(self, sequence: S, now: float) -> None:
        """See attempts.Keeper."""

    def retired(self, sequence: S) -> None:
        self._computation.retired(sequence)

    # -- the index of blocks ---------------------------------------------------------------------------------------

    def _publish_blocks(self) -> None:
        stored, removed = self.pool.take_changes()
        self._blocks_seq += 1
        self._out.commands.append(PublishBlocks(self._blocks_seq, stored, removed))

    def _on_snapshot_wanted(self, event: SnapshotWanted, now: float) -> None:
        self._out.commands.append(PublishSnapshot(self._blocks_seq, self.pool.keys()))

    # -- outside views ---------------------------------------------------------------------------------------------

    @property
    def cost(self) -> CostCoefficients:
        """The time model as it stands."""
        return self._predictions.cost

    @property
    def turnover(self) -> int:
        """How often `attempts` changed."""
        return self._table.turnover

    def attempts(self) -> tuple[AttemptId, ...]:
        """All that were accepted and have not ended; the same tuple until that changes."""
        return self._table.attempts()

    def load(self, now: float, seq: int = 0, stage: Stage = "ready", *, totals: bool = True) -> NodeLoad:
        """How busy the node is: its heartbeat. `totals` off: without the counters, which nobody plans by."""
        table, pool, predictions = self._table, self.pool, self._predictions
        return NodeLoad(
            node=self.worker.node,
            incarnation=self.worker.incarnation,
            role=self.role,
            seq=seq,
            stage="draining" if table.drain_deadline is not None else stage,
            running=len(table.active),
            waiting=len(table.waiting),
            kv_blocks=pool.total,
            kv_blocks_held=pool.held,
            kv_blocks_cached=pool.cached,
            queue_s=self._queue_s(now),
            batch_tokens=table.tokens if self.role == "decode" else 0,
            attempts=table.attempts(),
            counters=self.counters.copy() if totals else {},
            block_events_seq=self._blocks_seq,
            cost=predictions.cost if predictions.learns else None,
            cost_samples=predictions.samples(self.cost_kind) if predictions.learns else 0,
            cost_given=not predictions.learns,
            fetched_near=predictions.fetched_near,
            fetched_far=predictions.fetched_far,
        )

    def _queue_s(self, now: float) -> float:
        """Predicted seconds until a prompt that comes now would be begun."""
        predictions = self._predictions
        if not predictions.backlog_s > 0.0:
            return 0.0
        if self.role != "decode":
            return predictions.queue_s(self._table.live.values(), now)
        decoding = [s.wanted for s in self._table.active.values() if s.decoding]
        return predictions.queue_s(self._table.live.values(), now, len(decoding), sum(decoding))

    def check(self) -> None:
        self._computation.check()
        check_attempts(self._table, self.worker)
        check_pages(self._table, self.pool, self.worker.block_tokens)
        check_step(self._table, self._computation.inflight)
        self._predictions.check(list(self._table.live.values()))
