"""Landings: the data plane's words become the machine's events, each once."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.core.worker.transfers import (
    CloseLanding,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    LandingProgressed,
    OpenLanding,
)
from shared.dataplane.api import LandingCommit
from shared.protocol.handoff import HandoffInfo
from shared.protocol.sampling import TokenLogprob
from shared.protocol.wire import encode
from shared.worker_node.landing_events import Landings, ending
from tests.support.fakes.endpoints import LAYOUT, eventually, site

LANDING = b"l" * 16


async def test_a_handoff_arrives_with_its_first_token_and_progress_is_told() -> None:
    async with site("writer", "tcp") as writer, site("reader", "tcp") as reader:
        events: list[Any] = []
        landings = Landings(reader.endpoint, events.append)
        landings.open(OpenLanding("a", LANDING, (4, 2)))
        content = writer.fill(1)
        stream = writer.endpoint.open_write(reader.endpoint.ref, LANDING)
        landings.look()
        assert events == []
        for layer in range(LAYOUT.layers):
            stream.write(layer, [(0, 1)])
            await eventually(
                lambda want=layer + 1: (  # type: ignore[misc]
                    (s := reader.endpoint.landing_stats(LANDING)) is not None and s.slices == want
                ),
                "the slice is there",
            )
            landings.look()
            landings.look()
        assert events == [LandingProgressed("a")] * LAYOUT.layers
        await stream.commit(1, encode(HandoffInfo(7, TokenLogprob(-0.5), 16)))
        await eventually(lambda: len(events) > LAYOUT.layers, "it arrives")
        assert events[-1] == LandingArrived("a", 7, TokenLogprob(-0.5), 16)
        assert landings.first_slice_at > 0
        assert reader.read(4) == content


async def test_a_closed_landing_says_nothing_more() -> None:
    async with site("writer", "tcp") as writer, site("reader", "tcp") as reader:
        events: list[Any] = []
        landings = Landings(reader.endpoint, events.append)
        landings.open(OpenLanding("a", LANDING, (4,)))
        stream = writer.endpoint.open_write(reader.endpoint.ref, LANDING)
        stream.write(0, [(0, 1)])
        assert await landings.close(CloseLanding("a", LANDING)) == LandingClosed("a")
        reply = await stream.commit(1)
        assert not reply.ok
        await asyncio.sleep(0)
        assert events == []


def test_what_is_not_whole_or_not_readable_has_failed() -> None:
    bad = LandingCommit(LANDING, False, b"", "block 1 is corrupt")
    assert ending("a", bad) == LandingFailed("a", "block 1 is corrupt")
    unreadable = ending("a", LandingCommit(LANDING, True, b"\xff\x00"))
    assert isinstance(unreadable, LandingFailed)
