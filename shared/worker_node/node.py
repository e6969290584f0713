"""The shell of a node that computes: engine, pages and data plane around a worker machine.

Services derive from it and add what is their role's. Stages: starting, loading (engine), warming (a real run), ready;
off ready while the engine is wedged; draining.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

import structlog

from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.core.kv.block_keys import pack_tokens
from shared.core.kv.eviction import POLICIES
from shared.core.machine import Ask, BusFound, BusLost, Ticked
from shared.core.worker import events as w
from shared.core.worker.machine import WorkerMachine
from shared.core.worker.steps import InterruptRun, RunStep, SequenceStep, StepDone, StepFailed
from shared.core.worker.transfers import (
    AbortStreams,
    BlocksFetched,
    CommitPoolWrite,
    FetchBlocks,
    OpenPoolWrite,
    SendBlocks,
    patience_s,
)
from shared.dataplane.endpoint import Endpoint, EndpointOptions, endpoint
from shared.dataplane.memory.arena import Arena
from shared.dataplane.wire.hello import Identity
from shared.engine.api import Engine, EngineLost, Progress
from shared.engine.load import load_engine
from shared.io.block_feed import BlockFeed
from shared.io.config import ConfigError
from shared.io.driver import Driver
from shared.io.models import resolve_model
from shared.io.plugins.classes import load_classes, register
from shared.io.service import Context
from shared.io.token_feed import TokenFeed
from shared.protocol import subjects
from shared.protocol.cluster import CostCoefficients, NodeInfo, NodeLoad, SnapshotAsked, Stage
from shared.protocol.errors import Internal, Invalid
from shared.protocol.ids import NodeRef, Role
from shared.protocol.model import ModelSpec
from shared.protocol.requests import CancelAttempt, SyncRequest
from shared.protocol.sampling import SamplingParams
from shared.worker_node.calibrate import calibrate
from shared.worker_node.config import NodeConfig
from shared.worker_node.engine_runner import EngineRunner
from shared.worker_node.kv_streams import KVStreams

TICK_S = 0.2
PROGRESS_S = 0.5
DRAIN_SHARE = 0.7
"""Of the grace: then what still runs is given up, and the rest is for saying so and saving its blocks."""

log = structlog.get_logger(__name__)


class Node(ABC):
    """Implements io.service.App for a role whose machine is a WorkerMachine."""

    role: Role

    def __init__(self, context: Context, config: NodeConfig) -> None:
        try:
            register(POLICIES, config.eviction, param="eviction", adapt=lambda policy: policy())
            self._transports = load_classes(config.transports, param="transports")
        except Invalid as e:
            raise ConfigError(e.message, param=e.param) from e
        self.context = context
        self._config = config
        self._stage: Stage = "starting"
        self._detail = ""
        self._wedged = False
        self._asked = 0
        self._answers: dict[Ask, Any] = {}
        self._drained = asyncio.Event()
        self._blocks = BlockFeed(context.bus, context.node, context.incarnation)
        self._tokens = TokenFeed(context.bus, context.node, context.incarnation)
        self._engine: Engine | None = None
        self._endpoint: Endpoint | None = None
        self._runner: EngineRunner | None = None
        self._machine: WorkerMachine[Any] | None = None
        self._driver: Driver[Any] | None = None

    # -- what a role says ------------------------------------------------------------------------------------------

    @abstractmethod
    def make_machine(self, spec: ModelSpec, pages: int, cost: CostCoefficients) -> WorkerMachine[Any]:
        """The role's machine; `cost` is its first time model."""

    @abstractmethod
    async def subscribe(self) -> None:
        """Listen to what only this role is asked."""

    @abstractmethod
    def execute(self, command: Any) -> Awaitable[Any] | None:
        """Carry out a command that only this role's machine gives; see io.driver."""

    @abstractmethod
    def on_tick(self) -> None:
        """A few times a second, before the machine is told."""

    @abstractmethod
    def own_counters(self) -> dict[str, float]:
        """Counters that only this role has."""

    # -- App -------------------------------------------------------------------------------------------------------

    def info(self) -> NodeInfo:
        context, machine = self.context, self._machine
        ref = NodeRef(context.node, context.incarnation, host=context.host)
        return NodeInfo(
            ref=self._endpoint.ref if self._endpoint is not None else ref,
            role=self.role,
            stage=self._stage,
            detail=self._detail,
            pid=os.getpid(),
            model=self._engine.spec if self._engine is not None else None,
            kv_blocks=self._engine.store.pages if self._engine is not None else 0,
            max_running=machine.worker.max_running if machine is not None else 0,
            max_waiting=machine.worker.max_waiting if machine is not None else 0,
            chunk_tokens=machine.worker.chunk_tokens if machine is not None else 0,
            cost=machine.cost if machine is not None else None,
        )

    def load(self, seq: int) -> NodeLoad:
        context, machine = self.context, self._machine
        if machine is None:
            return NodeLoad(context.node, context.incarnation, self.role, seq, self._stage)
        load = machine.load(time.monotonic(), seq, self._stage)
        assert self._endpoint is not None
        load.counters.update(
            self._endpoint.counters(),
            block_events_dropped=self._blocks.dropped,
            tokens_dropped=self._tokens.dropped,
            layer_slices_sent_before_last_layer=self.streams.early_slices,
            last_layer_at_s=self.streams.last_layer_at,
            engine_s=self._runner.engine_s if self._runner is not None else 0.0,
            **self.own_counters(),
        )
        return load

    async def start(self) -> None:
        await self._enter("loading", f"loading {self._config.model}")
        self._engine = await asyncio.to_thread(self._load, self._progress())
        await self._enter("warming", "opening the data plane")
        self._endpoint = await self._open_endpoint(self._engine)
        layout, tasks = self._engine.spec.layout, self.context.tasks
        self.plane = self._endpoint
        self.streams = KVStreams(
            self.plane, layout.layers, layout.block_tokens, tasks, layerwise=self._config.layerwise
        )
        await self._enter("warming", "computing a first token")
        await self._warm_up(self._engine)
        await self._enter("warming", "timing the engine")
        cost = await asyncio.to_thread(calibrate, self._engine)
        self._machine = self.make_machine(self._engine.spec, self._engine.store.pages, cost)
        self._runner = EngineRunner(self._engine, self._step_ended)
        self._driver = Driver(self._machine, self._execute, tasks=tasks, recorder=self.context.recorder)
        for work in (self._blocks.run(), self._tokens.run(), self._tick()):
            tasks.create_task(work)
        await self._subscribe()
        await self._enter("ready", "")

    async def drain(self, grace_s: float) -> None:
        await self._enter("draining", "")
        if self._driver is None:
            return
        self.feed(w.DrainStarted(grace_s * DRAIN_SHARE))
        try:
            async with asyncio.timeout(grace_s):
                await self._drained.wait()
                await self._tokens.flushed()
        except TimeoutError:
            log.warning("not_drained", attempts=len(self._machine.attempts()) if self._machine else 0)

    async def close(self) -> None:
        ended = self._runner is None or await asyncio.to_thread(self._runner.close)
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._engine is not None and ended:
            self._engine.close()

    # -- starting --------------------------------------------------------------------------------------------------

    def _load(self, progress: Progress) -> Engine:
        """In a thread of its own. A model that is not there is told before anything heavy is imported."""
        if self._config.engine == "auto":
            resolve_model(self._config.model)
        return load_engine(self._config.engine_config(), progress)

    async def _open_endpoint(self, engine: Engine) -> Endpoint:
        config, context = self._config, self.context
        assert isinstance(engine.store, Arena), "the data plane moves blocks of an arena"
        options = EndpointOptions(
            host=context.host,
            bind=config.bind,
            advertise=config.advertise,
            shm=config.shm,
            transports=self._transports,
        )
        identity = Identity(context.node, context.incarnation, engine.spec.namespace)
        plane = endpoint(identity, engine.store, options)
        await plane.start()
        return plane

    async def _warm_up(self, engine: Engine) -> None:
        """A prompt of two tokens and one decode step, for real: ready means that this works."""
        greedy = SamplingParams(temperature=0.0)
        for start, tokens in ((0, [1, 2]), (2, [3])) if engine.spec.layout.block_tokens > 2 else ((0, [1]),):
            step = SequenceStep("warm-up", start, len(tokens), pack_tokens(tokens), (0,), greedy)
            (result,) = await asyncio.to_thread(engine.run, [step])
            if result.error or not result.tokens:
                raise Internal(f"the engine computed no token: {result.error}")

    def _progress(self) -> Progress:
        """Announces what the engine is doing while it loads, now and then; called in the loading thread."""
        loop = asyncio.get_running_loop()
        last = 0.0

        def report(what: str, fraction: float) -> None:
            nonlocal last
            if time.monotonic() - last > PROGRESS_S:
                last = time.monotonic()
                loop.call_soon_threadsafe(self._enter_soon, "loading", f"{what} ({fraction:.0%})")

        return report

    async def _subscribe(self) -> None:
        bus, node = self.context.bus, self.context.node
        bus.on_connection(lambda up: self.feed(BusFound() if up else BusLost()))
        await bus.subscribe_ordered(subjects.heartbeats_of("gateway"), NodeLoad, self._on_gateway_load)
        await bus.subscribe_ordered(subjects.cancel(node), CancelAttempt, self._on_cancel)
        await bus.subscribe_ordered(subjects.snapshot(node), SnapshotAsked, self._on_snapshot_asked)
        await bus.subscribe_ordered(subjects.ANNOUNCE, NodeInfo, self._on_announced)
        await bus.subscribe(subjects.sync(node), SyncRequest, self._on_sync)
        await self.subscribe()

    # -- events ----------------------------------------------------------------------------------------------------

    def feed(self, event: Any) -> None:
        assert self._driver is not None
        assert self._machine is not None
        before = self._machine.attempts()
        self._driver.feed(event)
        if self._machine.attempts() is not before:
            self.context.heartbeat_soon()

    def ask(self, event: Any) -> Any:
        """Feed an event that carries `self.next_ask()` and is answered at once."""
        self.feed(event)
        return self._answers.pop(event.ask)

    def next_ask(self) -> Ask:
        self._asked += 1
        return self._asked

    def _step_ended(self, end: StepDone | StepFailed) -> None:
        self.feed(end)

    def _on_gateway_load(self, load: NodeLoad) -> None:
        self.feed(w.GatewaySeen(load.node, load.incarnation))

    def _on_cancel(self, cancel: CancelAttempt) -> None:
        self.feed(w.AttemptCancelled(cancel.attempt, cancel.reason))

    def _on_snapshot_asked(self, asked: SnapshotAsked) -> None:
        self.feed(SnapshotWanted())

    def _on_announced(self, info: NodeInfo) -> None:
        """A new life of a node: what is left of the connections of its old one goes."""
        if self._endpoint is not None and info.ref.node != self.context.node:
            self._endpoint.forget(info.ref.node, info.ref.incarnation)

    async def _on_sync(self, request: SyncRequest) -> Any:
        return self.ask(w.SyncAsked(request.attempt, request.from_index, self.next_ask()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.on_tick()
            self.feed(Ticked())
            await self._watch_engine()

    async def _watch_engine(self) -> None:
        """Raises EngineLost, which ends the process: whoever started it starts a new one."""
        assert self._runner is not None
        assert self._engine is not None
        if fault := self._engine.fault():
            raise EngineLost(fault)
        wedged = self._runner.busy_s() > self._config.wedged_after_s
        if wedged == self._wedged:
            return
        self._wedged = wedged
        log.error("engine_wedged", busy_s=self._runner.busy_s()) if wedged else log.info("engine_moves_again")
        if self._stage != "draining":
            await self._enter("loading" if wedged else "ready", "wedged" if wedged else "")

    # -- commands --------------------------------------------------------------------------------------------------

    def _execute(self, command: Any) -> Awaitable[Any] | None:
        match command:
            case RunStep():
                assert self._runner is not None
                self._runner.submit(command, self.streams.layer_writer(command))
            case InterruptRun():
                pass  # steps are never repeated here
            case w.Reply():
                self._answers[command.ask] = command.message
            case w.SendTokens():
                self._tokens.publish(command)
            case PublishBlocks() | PublishSnapshot():
                self._blocks.publish(command)
            case FetchBlocks():
                return self._fetch(command)
            case OpenPoolWrite():
                self.streams.open_pool_write(command)
            case SendBlocks():
                self.streams.send_blocks(command)
            case CommitPoolWrite():
                return self.streams.commit_pool_write(command.attempt)
            case AbortStreams():
                for ending in self.streams.abort(command):
                    self.context.tasks.create_task(self._feed_when(ending))
            case w.Drained():
                self._drained.set()
            case _:
                return self.execute(command)
        return None

    async def _feed_when(self, ending: Awaitable[Any]) -> None:
        self.feed(await ending)

    async def _fetch(self, command: FetchBlocks) -> BlocksFetched:
        assert self._endpoint is not None
        source, began = command.source, time.monotonic()
        result = await self._endpoint.fetch(
            source.holder, command.namespace, command.keys, command.pages, patience_s(source)
        )
        # Links are measured by it, so the wait for blocks that were still being computed is no part of it.
        seconds = max(0.0, time.monotonic() - began - result.waited_s)
        return BlocksFetched(
            command.attempt, source.first_block, result.blocks, result.error, seconds, command.turn
        )

    # -- stages ----------------------------------------------------------------------------------------------------

    async def _enter(self, stage: Stage, detail: str) -> None:
        if self._stage == "draining":
            return
        self._stage, self._detail = stage, detail
        await self.context.announce_now()

    def _enter_soon(self, stage: Stage, detail: str) -> None:
        if self._stage == stage:
            self.context.tasks.create_task(self._enter(stage, detail))
