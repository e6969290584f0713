"""What a gateway makes of announcements: models come, change and stay; lost and late nodes are told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from services.gateway.generation.cluster import Cluster
from shared.core.conductor.node_registry import NodeRegistry
from shared.core.machine import BusFound, BusLost
from shared.core.request import events as ev
from shared.engine.toy.engine import toy_spec
from shared.io.memory_bus import MemoryBroker
from shared.protocol import subjects
from shared.protocol.cluster import CostCoefficients, NodeInfo, NodeLoad
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef
from shared.protocol.model import ModelSpec
from shared.text.load import load_text
from shared.text.toy_text import ToyText
from tests.support.fakes.fake_cluster import Tasks
from tests.support.until import until

SPEC = toy_spec()


class House:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = self.broker.connect()
        self.told: list[Any] = []
        self.broken = False
        self.cluster = Cluster(self.broker.connect(), "gateway-0", 0.4, self._load, self.told.append)

    def _load(self, spec: ModelSpec) -> ToyText:
        if self.broken:
            raise Invalid("no tokenizer here")
        return ToyText()

    async def announce(
        self, node: str, incarnation: str = "1", spec: ModelSpec | None = SPEC, blocks: int = 10
    ) -> None:
        role: Any = node.split("-")[0]
        info = NodeInfo(NodeRef(node, incarnation), role, "ready", model=spec, kv_blocks=blocks)
        await self.bus.publish(subjects.ANNOUNCE, info)
        await self.bus.flush()

    async def beat(self, node: str, seq: int, incarnation: str = "1") -> None:
        role: Any = node.split("-")[0]
        await self.bus.publish(
            subjects.heartbeat(role, node), NodeLoad(node, incarnation, role, seq, "ready")
        )
        await self.bus.flush()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    tasks = Tasks()
    await house.cluster.start(cast(asyncio.TaskGroup, tasks))
    yield house
    await tasks.end()


async def test_a_model_is_served_once_announced_and_stays(house: House) -> None:
    assert house.cluster.missing()
    await house.announce("decode-0")
    await until(lambda: "toy" in house.cluster.models)
    await until(lambda: ev.NodeLost("decode-0", "1") in house.told)
    assert "toy" in house.cluster.models
    assert any("decode: lost" in m for m in house.cluster.missing())


async def test_another_spec_of_the_name_replaces_it_when_nobody_serves_the_first(house: House) -> None:
    other = msgspec.structs.replace(SPEC, namespace=b"\xff" * 16)
    house.cluster.members.lost_after_s = 60.0
    await house.announce("decode-0")
    await until(lambda: "toy" in house.cluster.models)
    await house.announce("decode-1", spec=other)
    await asyncio.sleep(0.3)
    assert house.cluster.models["toy"].spec == SPEC
    await house.announce("decode-0", incarnation="2", spec=other)
    await until(lambda: house.cluster.models["toy"].spec == other)
    assert ev.NodeLost("decode-0", "1") in house.told


async def test_of_two_specs_of_a_name_the_one_of_most_ready_nodes_is_served_whoever_came_first(
    house: House,
) -> None:
    other = msgspec.structs.replace(SPEC, namespace=b"\xff" * 16)
    house.cluster.members.lost_after_s = 60.0
    await house.announce("decode-0")
    await until(lambda: "toy" in house.cluster.models)
    await house.announce("decode-1", spec=other)
    await house.announce("prefill-1", spec=other)
    await until(lambda: house.cluster.models["toy"].spec == other)
    registry = NodeRegistry(stale_s=5.0, prior=CostCoefficients())
    registry.rebuild(house.cluster.members)
    assert registry.groups["toy"].spec == other


async def test_a_served_spec_whose_kv_is_the_chosen_ones_stays(house: House) -> None:
    elsewhere = msgspec.structs.replace(SPEC, path="/elsewhere")
    house.cluster.members.lost_after_s = 60.0
    await house.announce("decode-0")
    await until(lambda: "toy" in house.cluster.models)
    await house.announce("decode-1", spec=elsewhere)
    await house.announce("prefill-1", spec=elsewhere)
    await asyncio.sleep(0.6)
    assert house.cluster.models["toy"].spec == SPEC


async def test_a_model_without_a_tokenizer_here_is_a_problem_until_it_is_found(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.generation.cluster.RETRY_TEXT_S", 0.1)
    house.broken = True
    await house.announce("decode-0")
    await until(lambda: house.cluster.problem)
    assert any("no tokenizer here" in m for m in house.cluster.missing())
    house.broken = False
    await until(lambda: "toy" in house.cluster.models)
    assert not house.cluster.problem


async def test_late_nodes_are_suspected_before_they_are_lost(house: House) -> None:
    await house.announce("decode-0")
    for seq in range(1, 5):
        await house.beat("decode-0", seq)
        await asyncio.sleep(0.05)
    assert not house.told
    await until(lambda: ev.NodeLost("decode-0", "1") in house.told)
    assert house.told.index(ev.NodeSuspected("decode-0", "1")) < house.told.index(
        ev.NodeLost("decode-0", "1")
    )


async def test_strangers_are_asked_who_they_are(house: House) -> None:
    rolls: list[Any] = []
    await house.bus.subscribe_ordered(subjects.ROLL_CALL, dict, rolls.append)
    await asyncio.sleep(0.6)
    rolls.clear()
    await house.beat("decode-7", 1)
    await until(lambda: rolls)


async def test_nobody_is_lost_while_the_own_bus_is_down(house: House) -> None:
    await house.announce("decode-0")
    house.broker.stop()
    await asyncio.sleep(0.8)
    assert house.told == [BusLost()]
    house.broker.start()
    assert house.told == [BusLost(), BusFound()]


async def test_room_is_that_of_the_largest_decode_node(house: House) -> None:
    assert house.cluster.most_tokens(SPEC) == SPEC.context_tokens
    await house.announce("decode-0", blocks=10)
    await house.announce("decode-1", blocks=30)
    await house.announce("prefill-0", blocks=99)
    await until(lambda: len(list(house.cluster.members)) == 3)
    assert house.cluster.most_tokens(SPEC) == 30 * SPEC.layout.block_tokens


def test_the_text_of_a_model_is_found_here_or_refused(tmp_path: Any) -> None:
    assert isinstance(load_text(SPEC), ToyText)
    elsewhere = msgspec.structs.replace(SPEC, name="m", path=str(tmp_path / "gone"))
    with pytest.raises(Invalid):
        load_text(elsewhere, str(tmp_path))
    with pytest.raises(Invalid, match="configured for the toy"):
        load_text(elsewhere, "toy")
