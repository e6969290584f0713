"""A real gateway, with its HTTP server, over stand-ins for everything behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import httpx

from services.gateway.app import GatewayApp
from services.gateway.config import GatewayConfig
from services.gateway.generation.gateway import Gateway
from shared.io.bus import Bus
from shared.io.memory_bus import MemoryBroker
from shared.io.nats_bus import connect
from shared.io.presence import Presence
from shared.io.recorder import Recorder
from shared.io.service import Context
from shared.protocol.ids import new_incarnation
from tests.support.fakes.fake_nodes import FakeConductor, FakeDecode, FakePrefill
from tests.support.processes.nats import NatsServer
from tests.support.until import until

OpenBus = Callable[[], Awaitable[Bus]]


class FakeCluster:
    """Parts may be stopped, replaced and added while the gateway runs."""

    def __init__(self, open_bus: OpenBus, app: GatewayApp) -> None:
        self._open_bus = open_bus
        self.app = app
        self.url = f"http://{app.address}"
        self.conductor: FakeConductor
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20.0, trust_env=False)

    @property
    def gateway(self) -> Gateway:
        return self.app.gateway

    async def add_conductor(self) -> None:
        self.conductor = FakeConductor(await self._open_bus())
        self._introduce()
        await self.conductor.start()

    async def add_decode(self, name: str = "decode-0") -> FakeDecode:
        node = FakeDecode(await self._open_bus(), name)
        self.decodes = [d for d in self.decodes if d.ref.node != name] + [node]
        self._introduce()
        await node.start()
        return node

    async def add_prefill(self, name: str = "prefill-0") -> FakePrefill:
        node = FakePrefill(await self._open_bus(), name)
        self.prefills = [p for p in self.prefills if p.ref.node != name] + [node]
        self._introduce()
        await node.start()
        return node

    def _introduce(self) -> None:
        self.conductor.prefills = [*self.prefills]
        self.conductor.decodes = [*self.decodes]
        for prefill in self.prefills:
            prefill.peers = {d.ref.node: d for d in self.decodes}

    def slow_down(self, token_s: float) -> None:
        for node in (*self.prefills, *self.decodes):
            node.token_s = token_s

    async def ready(self) -> None:
        await until(lambda: not self.gateway.missing())

    async def idle(self) -> None:
        """Wait until nothing runs and no node has work."""
        await until(lambda: not self.gateway.running)
        await until(lambda: not any(node.work for node in (*self.prefills, *self.decodes)))
        self.gateway.metrics.check()

    async def close(self) -> None:
        await self.http.aclose()
        for node in (self.conductor, *self.prefills, *self.decodes):
            await node.stop()

    def sample(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.value(name, **labels)


class Tasks:
    """Stands in for a service's task group. A task that failed fails the test at the end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failures: list[BaseException] = []

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.append(failure)

    async def end(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert not self._failures, self._failures


@contextlib.asynccontextmanager
async def fake_cluster(open_bus: OpenBus, **config: Any) -> AsyncIterator[FakeCluster]:
    fields: dict[str, Any] = {"node": "gateway-0", "advertise": "127.0.0.1", "port": 0} | config
    settings = GatewayConfig(**fields)
    bus = await open_bus()
    incarnation = new_incarnation()
    tasks = Tasks()
    group = cast(asyncio.TaskGroup, tasks)
    presence = Presence(bus, "gateway", settings.node, incarnation, 0.1)
    recorder = Recorder(settings.record) if settings.record else None
    app = GatewayApp(Context(bus, settings, incarnation, group, presence, recorder), settings)
    cluster = FakeCluster(open_bus, app)
    await presence.begin(app, group)
    starting = asyncio.create_task(app.start())
    await cluster.add_conductor()
    await cluster.add_prefill()
    await cluster.add_decode()
    try:
        await starting
        await cluster.ready()
        yield cluster
    finally:
        await cluster.close()
        await app.close()
        await tasks.end()


@contextlib.asynccontextmanager
async def memory_cluster(**config: Any) -> AsyncIterator[FakeCluster]:
    """A FakeCluster over a bus in this process."""
    broker = MemoryBroker()
    buses: list[Bus] = []

    async def open_bus() -> Bus:
        buses.append(broker.connect())
        return buses[-1]

    async with fake_cluster(open_bus, **config) as cluster:
        yield cluster
    for bus in buses:
        await bus.close()


@contextlib.asynccontextmanager
async def nats_cluster(server: NatsServer, **config: Any) -> AsyncIterator[FakeCluster]:
    """A FakeCluster over a real nats-server."""
    buses: list[Bus] = []

    async def open_bus() -> Bus:
        buses.append(await connect(server.url, name=f"test-{len(buses)}"))
        return buses[-1]

    async with fake_cluster(open_bus, **config) as cluster:
        yield cluster
    for bus in buses:
        await bus.close()
