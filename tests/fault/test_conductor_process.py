"""The conductor as a process on a real nats-server, with nodes simulated by the test."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.io.bus import Bus
from shared.io.nats_bus import connect
from shared.protocol import subjects
from shared.protocol.cluster import (
    BlockEvents,
    BlockSnapshotPart,
    NodeInfo,
    NodeLoad,
    RollCall,
    SnapshotAsked,
)
from shared.protocol.errors import Overloaded, Unavailable
from shared.protocol.ids import BlockKey, Role
from shared.protocol.requests import Placement, PlaceRequest
from tests.support.fakes import broken_policies
from tests.support.fakes.broken_policies import FAILS_FROM_TOKENS
from tests.support.processes.nats import NatsServer
from tests.support.processes.spawn import spawn, tail
from tests.support.until import until
from tests.support.worlds.cluster_of import COST, SPEC, keys, ref
from tsukimi.replay import replay

ROLES: dict[str, Role] = {"p-0": "prefill", "p-1": "prefill", "d-0": "decode", "c-0": "cache", "c-1": "cache"}


class Cluster:
    """Nodes that answer roll calls and snapshot requests and send heartbeats. p-i and c-i are on the same host."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.silent: set[str] = set()
        self.held: dict[str, tuple[BlockKey, ...]] = {}
        self.seqs = dict.fromkeys(ROLES, 0)
        self.event_seqs = dict.fromkeys(ROLES, 0)
        self.snapshots = 0
        self.conductor: list[NodeInfo] = []
        self._asked = 0

    async def start(self) -> None:
        await self.bus.subscribe(subjects.ROLL_CALL, RollCall, self._on_roll_call)
        await self.bus.subscribe(subjects.ANNOUNCE, NodeInfo, self._on_announce)
        for node in ROLES:
            await self.bus.subscribe(subjects.snapshot(node), SnapshotAsked, self._snapshot_of(node))
        await self._announce()

    async def beat(self) -> None:
        while True:
            for node, role in ROLES.items():
                if node in self.silent or not self.bus.connected:
                    continue
                self.seqs[node] += 1
                load = NodeLoad(
                    node,
                    "1",
                    role,
                    self.seqs[node],
                    "ready",
                    kv_blocks=999,
                    block_events_seq=self.event_seqs[node],
                )
                await self.bus.publish(subjects.heartbeat(role, node), load)
            await asyncio.sleep(0.1)

    async def store(self, node: str, stored: tuple[BlockKey, ...], *, lose: bool = False) -> None:
        """`lose`: the event is not sent."""
        self.event_seqs[node] += 1
        self.held[node] = self.held.get(node, ()) + stored
        if not lose:
            await self.bus.publish(
                subjects.blocks(node), BlockEvents(node, "1", self.event_seqs[node], stored=stored)
            )

    async def place(self, prompt_tokens: int = 320, *known: BlockKey) -> Placement:
        self._asked += 1
        request = PlaceRequest(f"r{self._asked}/0/0", "toy", prompt_tokens, known, 50, 9.0)
        placement: Placement = await self.bus.request(subjects.PLACE, request, Placement, 5.0)
        return placement

    async def cached(self, *known: BlockKey) -> int:
        return _held(await self.place(16 * len(known) + 1, *known))

    async def cached_becomes(self, blocks: int, *known: BlockKey) -> Placement:
        """Return the first placement that pulls so many blocks from who holds them already."""
        async with asyncio.timeout(20.0):
            while True:
                placement = await self.place(16 * len(known) + 1, *known)
                if _held(placement) == blocks:
                    return placement
                await asyncio.sleep(0.01)

    async def refused(self) -> None:
        """Return once a request can't be placed."""
        async with asyncio.timeout(20.0):
            while True:
                try:
                    await self.place()
                except Unavailable:
                    return
                await asyncio.sleep(0.02)

    async def placed(self) -> None:
        """Return once a request can be placed."""
        async with asyncio.timeout(20.0):
            while True:
                with contextlib.suppress(Unavailable, Overloaded):
                    await self.place()
                    return
                await asyncio.sleep(0.02)

    async def _announce(self) -> None:
        for node, role in ROLES.items():
            if node not in self.silent:
                host = "g" if role == "decode" else f"h{node[-1]}"
                info = NodeInfo(ref(node, host), role, "ready", model=SPEC, kv_blocks=999, cost=COST)
                await self.bus.publish(subjects.ANNOUNCE, info)

    async def _on_roll_call(self, _: RollCall) -> None:
        await self._announce()

    async def _on_announce(self, info: NodeInfo) -> None:
        if info.role == "conductor":
            self.conductor.append(info)

    def _snapshot_of(self, node: str):  # type: ignore[no-untyped-def]
        async def answer(_: SnapshotAsked) -> None:
            self.snapshots += 1
            part = BlockSnapshotPart(node, "1", self.event_seqs[node], 0, 1, self.held.get(node, ()))
            await self.bus.publish(subjects.blocks(node), part)

        return answer


def _held(placement: Placement) -> int:
    """Blocks that a cache node holds by now. Earlier questions for the same prompt are still being computed."""
    return sum(s.blocks for s in placement.sources if not s.ready_in_s)


class ConductorProcess:
    def __init__(self, nats_url: str, folder: Path) -> None:
        self.record = folder / "conductor.events"
        self.log = folder / "conductor.log"
        self._nats_url = nats_url
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **fields: str) -> None:
        settings = {"nats-url": self._nats_url, "record": str(self.record), "inline-tokens": "0"} | fields
        flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = spawn([sys.executable, "-m", "services.conductor", *flags], log=self.log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10.0)

    async def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, 15.0)


@pytest.fixture
async def conductor(nats: NatsServer, tmp_path: Path) -> AsyncIterator[ConductorProcess]:
    process = ConductorProcess(nats.url, tmp_path)
    yield process
    if process.process is not None and process.process.poll() is None:
        process.kill()


@pytest.fixture
async def cluster(nats: NatsServer, conductor: ConductorProcess) -> AsyncIterator[Cluster]:
    bus = await connect(nats.url, name="nodes")
    cluster = Cluster(bus)
    beating = asyncio.create_task(cluster.beat())
    try:
        await cluster.start()
        yield cluster
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await bus.close()


async def test_it_places_by_what_it_hears_and_its_recording_replays(
    cluster: Cluster, conductor: ConductorProcess
) -> None:
    conductor.start()
    await cluster.placed()
    assert [i.stage for i in cluster.conductor][-1] == "ready"
    head = keys(*range(1, 21))
    assert await cluster.cached(*head) == 0
    await cluster.store("c-1", head[:10])
    placement = await cluster.cached_becomes(10, *head)
    assert {s.holder.node for s in placement.sources} == {"c-1"}
    assert placement.decode is not None
    assert placement.decode.node == "d-0"
    assert placement.pool is not None
    assert placement.reason
    await asyncio.gather(*(cluster.place(100 + i) for i in range(100)))
    assert await conductor.end() == 0, tail(conductor.log)
    result = replay(conductor.record)
    assert result.difference is None
    assert result.events > 100


async def test_killed_and_restarted_it_knows_everything_again(
    cluster: Cluster, conductor: ConductorProcess
) -> None:
    conductor.start()
    await cluster.placed()
    head = keys(*range(1, 21))
    await cluster.store("c-0", head[:7])
    await cluster.cached_becomes(7, *head)
    conductor.kill()
    with pytest.raises(Unavailable):
        await cluster.place()
    conductor.start()
    await cluster.placed()
    assert await cluster.cached(*head) == 7
    assert conductor.process is not None
    await conductor.end()
    result = replay(conductor.record)
    assert (result.difference, result.restarts) == (None, 1)


async def test_a_lost_event_is_mended(cluster: Cluster, conductor: ConductorProcess) -> None:
    conductor.start()
    await cluster.placed()
    head = keys(*range(1, 21))
    await cluster.store("c-0", head[:3])
    await cluster.store("c-0", head[3:5], lose=True)
    await cluster.cached_becomes(5, *head)


async def test_a_silent_node_gets_no_work_and_returns_when_heard(
    cluster: Cluster, conductor: ConductorProcess
) -> None:
    conductor.start(**{"lost-after-s": "0.5"})
    await cluster.placed()
    cluster.silent.add("d-0")
    await cluster.refused()
    cluster.silent.clear()
    await cluster.placed()


async def test_after_a_bus_outage_it_goes_on(
    cluster: Cluster, conductor: ConductorProcess, nats: NatsServer
) -> None:
    conductor.start()
    await cluster.placed()
    head = keys(*range(1, 21))
    await cluster.store("c-0", head[:4])
    await asyncio.to_thread(nats.stop)
    nats.start()
    await until(lambda: cluster.bus.connected)
    await cluster.placed()
    await cluster.cached_becomes(4, *head)


@pytest.mark.parametrize(
    "policy",
    [
        "fastest",
        *(f"{broken_policies.__name__}:{name}" for name in ("NoPlace", "CannotBeMade", "AlwaysRaises")),
    ],
)
async def test_a_policy_that_cannot_work_is_a_configuration_error(
    conductor: ConductorProcess, policy: str
) -> None:
    conductor.start(policy=policy)
    assert conductor.process is not None
    assert await asyncio.to_thread(conductor.process.wait, 30.0) == 78
    assert policy in tail(conductor.log)
    assert "Traceback" not in conductor.log.read_text()


async def test_a_policy_that_fails_on_a_request_harms_nobody(
    cluster: Cluster, conductor: ConductorProcess
) -> None:
    conductor.start(policy=f"{broken_policies.__name__}:RaisesForLongPrompts")
    await cluster.placed()
    short, long = FAILS_FROM_TOKENS - 1, FAILS_FROM_TOKENS
    placements = [await cluster.place(tokens) for tokens in (short, long, long, short)]
    assert [p.policy.rpartition(":")[2] for p in placements] == [
        "RaisesForLongPrompts", "kvcache_centric", "kvcache_centric", "RaisesForLongPrompts"
    ]  # fmt: skip
    assert "failed" in placements[1].reason
    assert await conductor.end() == 0, tail(conductor.log)
    log = conductor.log.read_text()
    assert log.count("policy_failed") == 1, "a flood of failures is no flood of lines"
    assert "never thought of that" in log
    assert replay(conductor.record).difference is None


async def test_four_thousand_questions_at_once_are_all_answered(
    cluster: Cluster, conductor: ConductorProcess
) -> None:
    """As many as have room are placed; the others hear when to come again."""
    conductor.start()
    await cluster.placed()
    outcomes = await asyncio.gather(*(cluster.place(48) for _ in range(4000)), return_exceptions=True)
    refusals = [outcome for outcome in outcomes if not isinstance(outcome, Placement)]
    assert {type(refusal) for refusal in refusals} == {Overloaded}
    assert all(isinstance(r, Overloaded) and 0.1 <= (r.retry_after_s or 0.0) <= 60.0 for r in refusals)
    assert 100 < len(refusals) < 3900
    assert all("predicted wait" in str(refusal) for refusal in refusals), "each was judged"
    await cluster.placed()
