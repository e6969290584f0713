"""Turns what nodes announce into the supervisor's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.io.nats_bus import connect
from shared.protocol.cluster import NodeInfo, RollCall
from shared.protocol.subjects import ANNOUNCE, ROLL_CALL
from tsukimi.local import nats
from tsukimi.local.supervision_events import StageSeen

POLL_S = 0.05


async def watch_nats(name: str, pid: int, port: int, alive: Callable[[], bool]) -> StageSeen | None:
    """Returns once the server greets; None if that life has ended."""
    while alive():
        if await nats.answers(port):
            return StageSeen(name=name, pid=pid, stage="ready")
        await asyncio.sleep(POLL_S)
    return None


async def watch_nodes(url: str, feed: Callable[[StageSeen], None]) -> None:
    """Feed every announcement, without end. Ask all nodes for theirs whenever the bus connects."""
    bus = await connect(url, name="launcher")
    found = asyncio.Event()
    try:
        await bus.subscribe_ordered(ANNOUNCE, NodeInfo, lambda info: feed(_seen(info)))
        bus.on_connection(lambda connected: found.set() if connected else None)
        await bus.publish(ROLL_CALL, RollCall(asked_by="launcher"))
        while True:
            await found.wait()
            found.clear()
            await bus.publish(ROLL_CALL, RollCall(asked_by="launcher"))
    finally:
        await bus.close()


def _seen(info: NodeInfo) -> StageSeen:
    return StageSeen(name=info.ref.node, pid=info.pid, stage=info.stage, detail=info.detail)
