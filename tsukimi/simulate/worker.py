"""Prefill and decode nodes in simulated time: commands of their machines carried out by engine and data plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shared.core.kv.block_events import PublishBlocks, PublishSnapshot
from shared.core.worker import events as w
from shared.core.worker import transfers as t
from shared.core.worker.decode import DecodeMachine
from shared.core.worker.prefill import PrefillMachine
from shared.core.worker.steps import InterruptRun, RunStep
from shared.protocol.cluster import CostCoefficients, NodeInfo, NodeLoad
from shared.protocol.ids import AttemptId, NodeId, NodeRef
from shared.protocol.model import ModelSpec
from shared.protocol.requests import TokenDelta
from tsukimi.simulate.cores import SharedCores
from tsukimi.simulate.engine import CostEngine, Ran
from tsukimi.simulate.hosts import Hosts
from tsukimi.simulate.pool import Publish, SimulatedCache
from tsukimi.simulate.streams import Fetch, Handoff, PoolWrite, Sizes


class Peers(Protocol):
    """The rest of the cluster, as a worker's shell reaches it."""

    hosts: Hosts
    caches: dict[NodeId, SimulatedCache]
    workers: dict[NodeId, SimulatedWorker]

    def answer(self, reply: w.Reply) -> None: ...

    def deliver(self, node: NodeRef, deltas: tuple[TokenDelta, ...]) -> None: ...

    def report_soon(self, worker: SimulatedWorker) -> None:
        """Called once, and again only after `load` was called."""


class SimulatedWorker:
    """Feeds one PrefillMachine or DecodeMachine."""

    def __init__(
        self,
        ref: NodeRef,
        machine: PrefillMachine | DecodeMachine,
        spec: ModelSpec,
        cost: CostCoefficients,
        peers: Peers,
        publish: Publish,
        ran: Ran,
        *,
        cores: SharedCores | None,
        noise: Callable[[], float] | None,
    ) -> None:
        self.ref = ref
        self.machine = machine
        self._spec = spec
        self._sizes = Sizes.of(spec.layout)
        self._cost = cost
        self._peers = peers
        self._publish = publish
        self._timeline = peers.hosts.timeline
        self.engine = CostEngine(cost, self._timeline, self.feed, ran, cores, noise)
        self._handoffs: dict[AttemptId, Handoff] = {}
        self._pool_writes: dict[AttemptId, PoolWrite] = {}
        self._turnover = -1
        """The machine's turnover when a report was last asked for."""
        self._reporting = False
        """A report is due."""
        self._reports = 0
        self._do: dict[type, Callable[[Any], None]] = {
            w.Reply: peers.answer,
            w.SendTokens: lambda c: peers.deliver(self.ref, c.deltas),
            PublishBlocks: lambda c: publish(self.ref, c),
            PublishSnapshot: lambda c: publish(self.ref, c),
            RunStep: self._run_step,
            InterruptRun: self.engine.interrupt,
            t.FetchBlocks: self._fetch,
            t.OpenHandoff: self._open_handoff,
            t.OpenPoolWrite: self._open_pool_write,
            t.SendBlocks: self._send_blocks,
            t.CommitHandoff: lambda c: self._handoffs.pop(c.attempt).commit(c),
            t.CommitPoolWrite: lambda c: self._pool_writes.pop(c.attempt).commit(),
            t.AbortStreams: self._abort,
            t.OpenLanding: lambda c: None,
            t.CloseLanding: lambda c: self._timeline.send(self.feed, t.LandingClosed(c.attempt)),
        }

    def info(self) -> NodeInfo:
        worker = self.machine.worker
        return NodeInfo(
            ref=self.ref,
            role=self.machine.role,
            stage="ready",
            model=self._spec,
            kv_blocks=worker.pages,
            max_running=worker.max_running,
            max_waiting=worker.max_waiting,
            chunk_tokens=worker.chunk_tokens,
            cost=self._cost,
        )

    def feed(self, event: Any) -> None:
        machine = self.machine
        for command in machine.handle(event, self._timeline.now):
            self._do[type(command)](command)
        if machine.turnover != self._turnover:
            self._turnover = machine.turnover
            if not self._reporting:
                self._reporting = True
                self._peers.report_soon(self)

    def load(self) -> NodeLoad:
        """The next report."""
        self._reporting = False
        self._reports += 1
        return self.machine.load(self._timeline.now, self._reports, totals=False)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _run_step(self, command: RunStep) -> None:
        self.engine.start(command)
        if not (self._handoffs or self._pool_writes):
            return
        for s in command.sequences:
            for streams in (self._handoffs, self._pool_writes):
                stream = streams.get(s.attempt)
                if stream is not None:
                    stream.computed(s.start, s.tokens)

    def _fetch(self, command: t.FetchBlocks) -> None:
        cache = self._peers.caches[command.source.holder.node]
        Fetch(command, self._sizes, self._peers.hosts, self.ref.host, self.feed, cache)

    def _open_handoff(self, command: t.OpenHandoff) -> None:
        decode = self._peers.workers[command.target.decode.node]
        self._handoffs[command.attempt] = Handoff(
            command, self._sizes, self._peers.hosts, self.ref.host, self.feed, decode.feed
        )

    def _open_pool_write(self, command: t.OpenPoolWrite) -> None:
        self._pool_writes[command.attempt] = PoolWrite(
            command,
            self._sizes,
            self._peers.hosts,
            self.ref.host,
            self.feed,
            self._peers.caches[command.pool.node],
        )

    def _send_blocks(self, command: t.SendBlocks) -> None:
        if command.to_handoff and command.attempt in self._handoffs:
            self._handoffs[command.attempt].send(command.first_block, command.blocks)
        if command.to_pool and command.attempt in self._pool_writes:
            self._pool_writes[command.attempt].send(command.first_block, command.blocks)

    def _abort(self, command: t.AbortStreams) -> None:
        if command.handoff and command.attempt in self._handoffs:
            self._handoffs.pop(command.attempt).abort()
        if command.pool and command.attempt in self._pool_writes:
            self._pool_writes.pop(command.attempt).abort()
