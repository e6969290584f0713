"""Questions to the conductor and the nodes: who is refused gives its place back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.generation.node_client import NodeClient
from shared.core.request import events as ev
from shared.io.memory_bus import MemoryBroker
from shared.protocol import subjects
from shared.protocol.errors import Overloaded
from shared.protocol.ids import NodeRef
from shared.protocol.requests import Accepted, PlaceGivenUp, PrefillJob, Reserved, ReserveRequest
from shared.protocol.sampling import SamplingParams
from tests.support.worlds.virtual_time import run

NODE = NodeRef("node-0", "1")
ATTEMPT = "r/0/0"
RESERVE = ReserveRequest(ATTEMPT, "g", "G", "1", b"n", 3, 4, SamplingParams(), (), (1, 2, 3))
JOB = PrefillJob(ATTEMPT, "g", "G", "1", b"n", b"", (), SamplingParams(), 4)


def asked(*, refuses: bool, answers: bool = True) -> tuple[list[Any], list[str]]:
    """The events that a reservation and a job end in, and the attempts whose places were given back."""
    events: list[Any] = []
    given_up: list[str] = []

    async def reserve(request: ReserveRequest) -> Reserved:
        if refuses:
            raise Overloaded("full")
        return Reserved(request.attempt, b"landing", 1)

    async def prefill(job: PrefillJob) -> Accepted:
        if refuses:
            raise Overloaded("full")
        return Accepted(job.attempt)

    async def main() -> None:
        bus = MemoryBroker().connect()
        if answers:
            await bus.subscribe(subjects.reserve(NODE.node), ReserveRequest, reserve)
            await bus.subscribe(subjects.prefill(NODE.node), PrefillJob, prefill)
        await bus.subscribe_ordered(
            subjects.PLACE_GIVEN_UP, PlaceGivenUp, lambda m: given_up.append(m.attempt)
        )
        client = NodeClient(bus, 1.0, "life-1")
        events.append(await client.reserve(ev.Reserve(NODE, RESERVE)))
        events.append(await client.submit(ev.SubmitPrefill(NODE, JOB)))
        await asyncio.sleep(1)
        await bus.close()

    run(main())
    return events, given_up


@pytest.mark.parametrize("answers", [True, False], ids=["refused", "nobody-there"])
def test_a_place_that_a_node_refused_is_given_back(answers: bool) -> None:
    events, given_up = asked(refuses=True, answers=answers)
    assert [type(event) for event in events] == [ev.ReserveRefused, ev.SubmitRefused]
    assert given_up == [ATTEMPT, ATTEMPT]


def test_one_that_is_used_is_kept() -> None:
    events, given_up = asked(refuses=False)
    assert [type(event) for event in events] == [ev.ReserveAnswered, ev.SubmitAnswered]
    assert given_up == []
