"""A whole cluster in simulated time: the machines of every role, wired by control messages and flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.core.conductor.events import (
    AskSnapshot,
    BlocksChanged,
    CallRoll,
    ConductorConfig,
    ConductorStarted,
    LoadReported,
    NodeAnnounced,
    NoticeNode,
    NoticePolicyFailed,
    PlaceAsked,
    ReplyPlacement,
    ReplyRefusal,
    SnapshotArrived,
)
from shared.core.conductor.machine import ConductorMachine
from shared.core.conductor.objectives import Objectives
from shared.core.costs.links import Links
from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted, snapshot_parts
from shared.core.kv.block_keys import blocks_for, namespace_digest
from shared.core.machine import Ticked
from shared.core.worker.config import DecodeConfig, PrefillConfig
from shared.core.worker.decode import DecodeMachine
from shared.core.worker.events import Reply
from shared.core.worker.prefill import PrefillMachine
from shared.io.plugins.policies import load_policies, policy_failed
from shared.protocol.cluster import BlockEvents
from shared.protocol.ids import NodeId, NodeRef, Role
from shared.protocol.model import ModelSpec
from shared.protocol.requests import TokenDelta
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.cores import SharedCores
from tsukimi.simulate.gateway import FOREVER, SimulatedGateway
from tsukimi.simulate.hosts import Hosts
from tsukimi.simulate.measure import Measures
from tsukimi.simulate.pool import SimulatedCache
from tsukimi.simulate.timeline import Timeline
from tsukimi.simulate.trace import TraceRequest
from tsukimi.simulate.worker import SimulatedWorker

MODEL = "llama2-70b"
REPORT_S = 0.02
"""Least time between two load reports on change, in seconds, as in a live node."""
TICK_S = 60.0
MAX_REPEAT = 1 << 20


class SimulatedCluster:
    """Owns time. `run` is called once."""

    def __init__(self, config: SimulationConfig, requests: list[TraceRequest]) -> None:
        self.config = config
        self.timeline = Timeline(config.message_s)
        self.hosts = Hosts(self.timeline, config.nic_bytes_s, config.shm_bytes_s)
        self._cores = SharedCores(self.timeline, config.cores) if config.cores else None
        self.measures = Measures(requests, config.time_model)
        self._conductor_config = _conductor_config(config)
        load_policies(self._conductor_config)
        self.conductor = ConductorMachine(self._conductor_config)
        self.caches: dict[NodeId, SimulatedCache] = {}
        self.workers: dict[NodeId, SimulatedWorker] = {}
        self.requests = requests
        self._progressed: Callable[[int], None] | None = None
        self.ended_s = 0.0
        """When the last request ended."""
        namespace = namespace_digest(model=MODEL, cost=config.cost)
        self.gateway = SimulatedGateway(
            self, MODEL, namespace, config.layout.block_tokens, self.measures, self._ended
        )
        self._build(namespace)

    def run(self, progressed: Callable[[int], None] | None = None) -> None:
        """Calls `progressed(done)` after every request."""
        self._progressed = progressed
        self.timeline.at(0.0, self._to_conductor, ConductorStarted())
        for node in self._nodes():
            self.timeline.at(0.0, self._to_conductor, NodeAnnounced(node.info()))
            self.timeline.at(0.0, self._report, node)
        self.timeline.at(TICK_S, self._tick)
        self._expect(0)
        self.timeline.run()

    def check(self) -> None:
        """Check all machines' laws, and that nothing is left when all requests have ended."""
        self.conductor.check()
        self.hosts.network.check()
        for cache in self.caches.values():
            cache.machine.check()
        for worker in self.workers.values():
            worker.machine.check()
            assert worker.machine.pool.held == 0, f"{worker.ref.node} holds blocks for nobody"

    def _nodes(self) -> list[SimulatedCache | SimulatedWorker]:
        return [*self.caches.values(), *self.workers.values()]

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self, namespace: bytes) -> None:
        config, cost, block_tokens = self.config, self.config.time_model, self.config.layout.block_tokens
        spec = ModelSpec(MODEL, MODEL, 32_000, 1 << 20, (), config.layout, namespace)
        common: dict[str, Any] = {
            "namespace": namespace,
            "block_tokens": block_tokens,
            "pages": blocks_for(config.kv_tokens, block_tokens),
            "gateway_lease_s": FOREVER,
            "token_ids": False,
            "cost": cost,
            "fit_cost": False,
            "keep_blocks": config.keep_blocks,
            "stream_tokens": False,
            "chunk_tokens": config.chunk_tokens,
            "max_waiting": 1 << 20,
        }
        holders: tuple[Role, int] = (
            ("prefill", config.prefill) if config.prefill else ("decode", config.decode)
        )
        for i in range(holders[1] if config.cache is None else config.cache):
            ref = _ref("cache", i, self._host(holders[0], i % holders[1]))
            pages = blocks_for(config.pool_tokens, block_tokens)
            self.caches[ref.node] = SimulatedCache(ref, pages, self.timeline, self._publish)
        for i in range(config.prefill):
            ref = _ref("prefill", i, self._host("prefill", i))
            prefill = PrefillMachine(
                PrefillConfig(
                    node=ref.node, incarnation=ref.incarnation, max_running=config.max_prefills, **common
                )
            )
            self._add(ref, prefill, spec)
        for i in range(config.decode):
            ref = _ref("decode", i, self._host("decode", i))
            decode = DecodeMachine(
                DecodeConfig(
                    node=ref.node,
                    incarnation=ref.incarnation,
                    max_running=config.max_running,
                    headroom_tokens=1 << 20,
                    max_repeat=MAX_REPEAT,
                    **common | {"chunk_tokens": config.decode_chunk_tokens or config.chunk_tokens},
                )
            )
            self._add(ref, decode, spec)

    def _host(self, role: Role, number: int) -> str:
        return "host" if self.config.one_host else f"{role}-host-{number}"

    def _add(self, ref: NodeRef, machine: PrefillMachine | DecodeMachine, spec: ModelSpec) -> None:
        self.workers[ref.node] = SimulatedWorker(
            ref, machine, spec, self.config.time_model, self, self._publish, self.measures.ran, self._cores
        )

    # -- the conductor -----------------------------------------------------------------------------------------------

    def ask_conductor(self, event: PlaceAsked) -> None:
        self._to_conductor(event)

    def _to_conductor(self, event: Any) -> None:
        for command in self.conductor.handle(event, self.timeline.now):
            match command:
                case ReplyPlacement() | ReplyRefusal():
                    self.timeline.send(self.gateway.placed, command)
                case AskSnapshot(node=node):
                    self.timeline.send(self._asked_snapshot, node)
                case NoticePolicyFailed(attempt=attempt, error=error):
                    raise policy_failed(self._conductor_config, error, f"on {attempt.split('/')[0]}")
                case CallRoll() | NoticeNode():
                    pass

    def _asked_snapshot(self, node: NodeId) -> None:
        if node in self.caches:
            self.caches[node].asked_snapshot()
        else:
            self.workers[node].feed(SnapshotWanted())

    def _publish(self, ref: NodeRef, command: PublishBlocks | PublishSnapshot) -> None:
        if isinstance(command, PublishBlocks):
            events = BlockEvents(ref.node, ref.incarnation, command.seq, command.stored, command.removed)
            self.timeline.send(self._to_conductor, BlocksChanged(events))
            return
        for part in snapshot_parts(ref.node, ref.incarnation, command.seq, command.keys, 1 << 20):
            self.timeline.send(self._to_conductor, SnapshotArrived(part))

    def report_soon(self, worker: SimulatedWorker) -> None:
        self.timeline.at(self.timeline.now + REPORT_S, self._report, worker)

    def _report(self, node: SimulatedWorker | SimulatedCache) -> None:
        self._to_conductor(LoadReported(node.load()))

    # -- everybody ---------------------------------------------------------------------------------------------------

    def answer(self, reply: Reply) -> None:
        self.timeline.send(self.gateway.answered, reply)

    def deliver(self, node: NodeRef, deltas: tuple[TokenDelta, ...]) -> None:
        self.timeline.send(self.gateway.took_tokens, (node, deltas))

    def _expect(self, number: int) -> None:
        """The next request of the trace."""
        if number < len(self.requests):
            self.timeline.at(self.requests[number].arrival_s, self._arrived, number)

    def _arrived(self, number: int) -> None:
        self._expect(number + 1)
        self.gateway.arrived(self.requests[number])

    def _ended(self) -> None:
        self.ended_s = self.timeline.now
        if self._progressed is not None:
            self._progressed(self.measures.done)

    def _tick(self, _: Any) -> None:
        """Send heartbeats and ticks while anything is unfinished."""
        if self.measures.done == len(self.requests):
            return
        for node in self._nodes():
            node.feed(Ticked())
            self._report(node)
        self._to_conductor(Ticked())
        self.timeline.at(self.timeline.now + TICK_S, self._tick)


def _ref(role: Role, number: int, host: str) -> NodeRef:
    node = f"{role}-{number}"
    return NodeRef(node=node, incarnation=node, host=host)


def _conductor_config(config: SimulationConfig) -> ConductorConfig:
    return ConductorConfig(
        policy=config.policy,
        decode_policy=config.decode_policy,
        balancing_threshold=config.balancing_threshold,
        seed=config.seed,
        patience=config.patience,
        objectives=Objectives(
            ttft_s=config.ttft_slo_s,
            tbt_s=config.tbt_slo_s,
            max_wait_s=config.max_wait_s,
            admission=config.admission,
        ),
        links=Links(config.nic_bytes_s, config.shm_bytes_s, config.message_s),
        inline_tokens=config.inline_tokens,
        pool_answers=False,  # the answers' token ids are unknown: no prompt could find their blocks
        lost_after_s=FOREVER,
        stale_s=FOREVER,
    )
