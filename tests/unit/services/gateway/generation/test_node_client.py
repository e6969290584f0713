"""Questions for a place: stamped with the time they are waited for, and given up by word."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.gateway.generation.node_client import NodeClient
from shared.core.request import events as ev
from shared.io.memory_bus import MemoryBroker
from shared.protocol import subjects
from shared.protocol.requests import PlaceGivenUp, Placement, PlaceRequest
from tests.support.until import until

QUESTION = ev.AskPlace(PlaceRequest("r/0/0", "toy", 100, (), 10, 600.0))


class SlowConductor:
    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = broker.connect()
        self.asked: list[PlaceRequest] = []
        self.given_up: list[str] = []
        self.answers = asyncio.Event()

    async def start(self) -> None:
        await self.bus.subscribe(subjects.PLACE, PlaceRequest, self._on_place)
        await self.bus.subscribe_ordered(
            subjects.PLACE_GIVEN_UP, PlaceGivenUp, lambda m: self.given_up.append(m.attempt)
        )

    async def _on_place(self, request: PlaceRequest) -> Placement:
        self.asked.append(request)
        await self.answers.wait()
        return Placement(request.attempt, None, None)


@pytest.fixture
async def conductor() -> SlowConductor:
    conductor = SlowConductor(MemoryBroker())
    await conductor.start()
    return conductor


def node_client(conductor: SlowConductor, timeout_s: float) -> NodeClient:
    return NodeClient(conductor.bus, timeout_s, "life-1")


async def test_a_question_says_whose_it_is_when_it_was_asked_and_how_long_it_is_waited_for(
    conductor: SlowConductor,
) -> None:
    conductor.answers.set()
    before = time.monotonic()
    assert isinstance(await node_client(conductor, 5.0).place(QUESTION), ev.PlaceAnswered)
    [asked] = conductor.asked
    assert (asked.asker, asked.waits_s) == ("life-1", 5.0)
    assert before <= asked.asked_at_s <= time.monotonic()
    assert conductor.given_up == []


async def test_an_answer_that_comes_too_late_is_given_up_by_word(conductor: SlowConductor) -> None:
    answer = await node_client(conductor, 0.05).place(QUESTION)
    assert isinstance(answer, ev.PlaceRefused)
    assert answer.error.code == "deadline_exceeded"
    await until(lambda: conductor.given_up == ["r/0/0"])
    conductor.answers.set()


async def test_so_is_one_whose_client_left(conductor: SlowConductor) -> None:
    asking = asyncio.create_task(node_client(conductor, 5.0).place(QUESTION))
    await until(lambda: len(conductor.asked) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: conductor.given_up == ["r/0/0"])
    conductor.answers.set()
