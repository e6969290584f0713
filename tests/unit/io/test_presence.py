from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from shared.io.memory_bus import MemoryBroker
from shared.io.presence import COALESCE_S, Presence
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall, Stage
from shared.protocol.ids import NodeRef
from tests.support.worlds.virtual_time import run


class Node:
    stage: Stage = "starting"
    running = 0

    def info(self) -> NodeInfo:
        return NodeInfo(NodeRef("cache-0", "life"), "cache", self.stage)

    def load(self, seq: int) -> NodeLoad:
        return NodeLoad("cache-0", "life", "cache", seq, self.stage, running=self.running)


class Ended(Exception):
    """The scene is over: ends what the presence does for ever."""


class World:
    """A node, its presence, and all that others hear of it, with the time of each message."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.node = Node()
        self.infos: list[tuple[float, Stage]] = []
        self.loads: list[tuple[float, int, int]] = []
        self.left: list[NodeLeft] = []
        self.presence = Presence(
            self.broker.connect(name="node"), "cache", "cache-0", "life", heartbeat_s=0.5
        )
        self.ear = self.broker.connect(name="ear")

    async def listen(self) -> None:
        now = asyncio.get_running_loop().time
        await self.ear.subscribe_ordered(
            subjects.ANNOUNCE, NodeInfo, lambda m: self.infos.append((now(), m.stage))
        )
        await self.ear.subscribe_ordered(
            subjects.heartbeat("cache", "cache-0"),
            NodeLoad,
            lambda m: self.loads.append((now(), m.seq, m.running)),
        )
        await self.ear.subscribe_ordered(subjects.LEAVE, NodeLeft, self.left.append)


def play(scene: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await world.listen()
        async with asyncio.TaskGroup() as tasks:
            await world.presence.begin(world.node, tasks)
            await scene(world)
            raise Ended

    try:
        run(main())
    except* Ended:
        pass


def test_it_announces_at_once_and_beats_at_the_pace_set() -> None:
    async def scene(world: World) -> None:
        await asyncio.sleep(10.25)
        assert world.infos == [(0.0, "starting")]
        times = [time for time, _, _ in world.loads]
        assert len(times) == 21
        assert all(abs(time - 0.5 * n) < 0.05 for n, time in enumerate(times))
        assert [seq for _, seq, _ in world.loads] == list(range(1, 22))

    play(scene)


def test_changes_are_told_within_milliseconds_and_at_most_so_often() -> None:
    async def scene(world: World) -> None:
        await asyncio.sleep(0.3)
        heard = len(world.loads)
        world.node.running = 1
        world.presence.heartbeat_soon()
        await asyncio.sleep(0.001)
        assert [running for _, _, running in world.loads[heard:]] == [1]
        for n in range(200):
            world.node.running = n
            world.presence.heartbeat_soon()
            await asyncio.sleep(0.001)
        await asyncio.sleep(COALESCE_S)
        fast = [time for time, _, _ in world.loads[heard:]]
        assert 9 <= len(fast) <= 12
        assert min(b - a for a, b in itertools.pairwise(fast)) >= COALESCE_S - 1e-6
        assert world.loads[-1][2] == 199

    play(scene)


def test_it_is_silent_while_away_and_catches_up_at_once() -> None:
    async def scene(world: World) -> None:
        await asyncio.sleep(1.1)
        world.broker.stop()
        world.infos.clear()
        world.loads.clear()
        world.node.stage = "ready"
        await world.presence.announce_now()
        await asyncio.sleep(30.0)
        world.broker.start()
        await asyncio.sleep(2 * COALESCE_S)
        assert [stage for _, stage in world.infos] == ["ready"]
        assert len(world.loads) == 1  # none of those that were missed

    play(scene)


def test_a_roll_call_is_answered_with_announcement_and_heartbeat() -> None:
    async def scene(world: World) -> None:
        await asyncio.sleep(0.1)
        heard = len(world.loads)
        await world.ear.publish(subjects.ROLL_CALL, RollCall())
        await asyncio.sleep(0.01)
        assert len(world.infos) == 2
        assert len(world.loads) == heard + 1

    play(scene)


def test_who_left_does_not_beat_any_more() -> None:
    async def scene(world: World) -> None:
        await asyncio.sleep(0.1)
        await world.presence.leave()
        await asyncio.sleep(0.01)
        heard = len(world.loads)
        world.presence.heartbeat_soon()
        await asyncio.sleep(10.0)
        assert world.left == [NodeLeft("cache-0", "life")]
        assert len(world.loads) == heard

    play(scene)
