"""A cache node: the cache machine, an arena, and a data plane endpoint that serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import structlog

from services.cache_node.config import CacheNodeConfig
from services.cache_node.pool_backend import MachineBackend
from shared.core.cache import events as c
from shared.core.cache.config import CacheConfig
from shared.core.cache.machine import CacheCommand, CacheEvent, CacheMachine
from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.core.kv.eviction import POLICIES
from shared.core.machine import Ticked
from shared.dataplane.endpoint import Endpoint, EndpointOptions
from shared.dataplane.memory.anonymous import TOUCH_STRIDE_BYTES, Memory, Progress
from shared.dataplane.memory.arena import Arena
from shared.dataplane.memory.endpoint_memory import Home
from shared.dataplane.wire.hello import Identity, describe
from shared.io.block_feed import BlockFeed
from shared.io.config import ConfigError
from shared.io.driver import Driver
from shared.io.plugins.classes import load_classes, register
from shared.io.service import Context
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLoad, SnapshotAsked, Stage
from shared.protocol.errors import Invalid, Refused, TooLarge
from shared.protocol.ids import LandingId, NodeRef
from shared.protocol.model import KVLayout

TICK_S = 0.25
DRAIN_STEP_S = 0.02

log = structlog.get_logger(__name__)


class CacheNode:
    """Implements App. The first caller's KV layout decides how the arena is laid out, for the life of the process."""

    def __init__(self, context: Context, config: CacheNodeConfig) -> None:
        try:
            register(POLICIES, config.eviction, param="eviction", adapt=lambda policy: policy())
            self._transports = load_classes(config.transports, param="transports")
        except Invalid as e:
            raise ConfigError(e.message, param=e.param) from e
        self._context = context
        self._config = config
        self._machine = CacheMachine(
            CacheConfig(
                eviction=config.eviction,
                put_lease_s=config.put_lease_s,
                read_lease_s=config.read_lease_s,
                put_share=config.put_share,
                read_share=config.read_share,
            )
        )
        self._driver: Driver[CacheEvent] = Driver(
            self._machine, self._execute, tasks=context.tasks, recorder=context.recorder
        )
        self._backend = MachineBackend(self._driver.feed, self._machine.holds)
        self._feed = BlockFeed(context.bus, context.node, context.incarnation)
        self._arrived: dict[LandingId, int] = {}
        """Slices that each open put had received at the last check."""
        self._memory: Memory | None = None
        self._endpoint: Endpoint | None = None
        self._stage: Stage = "starting"
        self._detail = ""

    # -- App -----------------------------------------------------------------------------------------------------------

    def info(self) -> NodeInfo:
        ref = self._endpoint.ref if self._endpoint is not None else None
        return NodeInfo(
            ref=ref or NodeRef(self._context.node, self._context.incarnation),
            role="cache",
            stage=self._stage,
            detail=self._detail,
            kv_blocks=self._machine.pool.total,
        )

    def load(self, seq: int) -> NodeLoad:
        pool, machine = self._machine.pool, self._machine
        traffic = self._endpoint.counters() if self._endpoint is not None else {}
        return NodeLoad(
            node=self._context.node,
            incarnation=self._context.incarnation,
            role="cache",
            seq=seq,
            stage=self._stage,
            kv_blocks=pool.total,
            kv_blocks_held=pool.held,
            kv_blocks_cached=pool.cached,
            counters={**machine.counters, **traffic, "block_events_dropped": self._feed.dropped},
            block_events_seq=machine.blocks_seq,
        )

    async def start(self) -> None:
        await self._enter("loading", f"taking {self._config.pool_bytes >> 20} MiB of memory")
        try:
            self._memory = await asyncio.to_thread(Memory, self._config.pool_bytes, self._progress())
        except TooLarge as e:
            raise ConfigError(f"pool_bytes: {e.message}") from e
        self._endpoint = await self._open_endpoint(self._memory)
        tasks = self._context.tasks
        tasks.create_task(self._feed.run())
        tasks.create_task(self._tick())
        node = self._context.node
        await self._context.bus.subscribe(subjects.snapshot(node), SnapshotAsked, self._on_snapshot_asked)
        await self._context.bus.subscribe(subjects.ANNOUNCE, NodeInfo, self._on_announced)
        await self._enter("ready", "waiting for the first model")

    async def drain(self, grace_s: float) -> None:
        await self._enter("draining", "")
        self._backend.close()
        for _ in range(int(grace_s / DRAIN_STEP_S)):
            if not self._machine.pool.held:
                return
            await asyncio.sleep(DRAIN_STEP_S)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._memory is not None:
            self._memory.close()

    def _progress(self) -> Progress:
        """Announce each quarter of the memory that has been taken. Called in another thread."""
        loop = asyncio.get_running_loop()

        def report(done: int, total: int) -> None:
            if done * 4 // total != max(0, done - TOUCH_STRIDE_BYTES) * 4 // total:
                loop.call_soon_threadsafe(
                    self._enter_soon, "loading", f"{done >> 20} of {total >> 20} MiB taken"
                )

        return report

    def _enter_soon(self, stage: Stage, detail: str) -> None:
        self._context.tasks.create_task(self._enter(stage, detail))

    # -- machine -------------------------------------------------------------------------------------------------------

    def _execute(self, command: CacheCommand) -> Awaitable[CacheEvent | None] | None:
        match command:
            case c.GrantPut() | c.ConfirmPut() | c.GrantRead():
                self._backend.answer(command)
            case PublishBlocks() | PublishSnapshot():
                self._feed.publish(command)
                self._context.heartbeat_soon()
            case c.FencePut():
                return self._fence(command.landing)
        return None

    async def _fence(self, landing: LandingId) -> CacheEvent:
        assert self._endpoint is not None
        log.warning("put_expired", landing=landing.hex())
        await self._endpoint.close_landing(landing)
        return c.PutFenced(landing)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            moved = self._moved()
            if moved:
                self._driver.feed(c.PutProgressed(moved))
            self._driver.feed(Ticked())

    def _moved(self) -> tuple[LandingId, ...]:
        """Open puts that received slices since the last check."""
        assert self._endpoint is not None
        stats = {landing: self._endpoint.landing_stats(landing) for landing in self._machine.open_puts}
        arrived = {landing: its.slices for landing, its in stats.items() if its is not None}
        moved = tuple(
            landing for landing, slices in arrived.items() if slices != self._arrived.get(landing, 0)
        )
        self._arrived = arrived
        return moved

    # -- bus and data plane --------------------------------------------------------------------------------------------

    async def _open_endpoint(self, memory: Memory) -> Endpoint:
        config, context = self._config, self._context
        loop = asyncio.get_running_loop()

        def adopt(layout: KVLayout) -> Arena:
            arena = lay_out(memory, layout)
            loop.call_soon_threadsafe(self._laid_out, arena)
            return arena

        endpoint = Endpoint(
            Identity(context.node, context.incarnation),
            Home(memory, adopt=adopt),
            EndpointOptions(
                host=context.host,
                bind=config.bind,
                advertise=config.advertise,
                shm=config.shm,
                transports=self._transports,
            ),
        )
        await endpoint.start()
        endpoint.serve_pool(self._backend)
        return endpoint

    def _laid_out(self, arena: Arena) -> None:
        log.info("arena_laid_out", layout=describe(arena.layout), blocks=arena.pages)
        self._driver.feed(c.ArenaLaidOut(arena.pages))
        self._enter_soon(self._stage, f"holds {describe(arena.layout)}")

    async def _on_snapshot_asked(self, asked: SnapshotAsked) -> None:
        self._driver.feed(SnapshotWanted())

    async def _on_announced(self, info: NodeInfo) -> None:
        """A node has a new life: cut what is left of its old life's connections."""
        if self._endpoint is not None and info.ref.node != self._context.node:
            self._endpoint.forget(info.ref.node, info.ref.incarnation)

    async def _enter(self, stage: Stage, detail: str) -> None:
        self._stage, self._detail = stage, detail
        await self._context.announce_now()


def lay_out(memory: Memory, layout: KVLayout) -> Arena:
    """As many pages as fit in the memory. Raises Refused if not even one does."""
    pages = memory.size_bytes // layout.block_bytes if layout.block_bytes > 0 else 0
    if pages == 0:
        raise Refused(f"a block of {describe(layout)} does not fit a pool of {memory.size_bytes} bytes")
    return Arena(layout, pages, "page", memory=memory)
