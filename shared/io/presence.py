"""How a node is known in the cluster: announcements, heartbeats, and a message on leaving."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

import msgspec
import structlog

from shared.io.bus import Bus
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import Incarnation, NodeId, Role

log = structlog.get_logger(__name__)

COALESCE_S = 0.02
"""Least time between two heartbeats on change, in seconds."""


class Known(Protocol):
    """Something that knows what it is and how busy it is."""

    def info(self) -> NodeInfo: ...

    def load(self, seq: int) -> NodeLoad: ...


class Presence:
    """Announces a node at start, when asked, after a reconnect, and on roll calls. Sends heartbeats every `heartbeat_s`
    and on change. While disconnected it sends nothing, because old heartbeats are worse than none."""

    def __init__(
        self, bus: Bus, role: Role, node: NodeId, incarnation: Incarnation, heartbeat_s: float
    ) -> None:
        self._bus = bus
        self._node = node
        self._incarnation = incarnation
        self._heartbeat_s = heartbeat_s
        self._subject = subjects.heartbeat(role, node)
        self._known: Known | None = None
        self._seq = 0
        self._changed = asyncio.Event()
        self._unannounced = asyncio.Event()

    async def begin(self, known: Known, tasks: asyncio.TaskGroup) -> None:
        """Announce, and do what the class says until `tasks` end."""
        self._known = known
        self._bus.on_connection(self._on_connection)
        await self._bus.subscribe(subjects.ROLL_CALL, RollCall, self._on_roll_call)
        await self.announce_now()
        tasks.create_task(self._beat())
        tasks.create_task(self._announce_when_found())

    async def announce_now(self) -> None:
        if self._known is not None and self._bus.connected:
            info = msgspec.structs.replace(self._known.info(), pid=os.getpid())
            await self._publish(subjects.ANNOUNCE, info)
        self.heartbeat_soon()

    def heartbeat_soon(self) -> None:
        self._changed.set()

    async def leave(self) -> None:
        """Say that the node leaves, so that nobody waits for missing heartbeats."""
        known, self._known = (
            self._known,
            None,
        )  # no heartbeat after this: it would say that the node is still here
        if known is not None and self._bus.connected:
            await self._publish(subjects.LEAVE, NodeLeft(self._node, self._incarnation))

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            if self._known is not None and self._bus.connected:
                self._seq += 1
                await self._publish(self._subject, self._known.load(self._seq))
            await asyncio.sleep(min(COALESCE_S, self._heartbeat_s))
            try:
                async with asyncio.timeout(self._heartbeat_s - COALESCE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _announce_when_found(self) -> None:
        while True:
            await self._unannounced.wait()
            self._unannounced.clear()
            await self.announce_now()

    def _on_connection(self, up: bool) -> None:
        if up:
            self._unannounced.set()

    async def _on_roll_call(self, _: RollCall) -> None:
        await self.announce_now()

    async def _publish(self, subject: str, message: NodeInfo | NodeLoad | NodeLeft) -> None:
        try:
            await self._bus.publish(subject, message)
        except TsukimiError as e:  # the connection was just lost: the next heartbeat or reconnect repeats it
            log.warning("presence_not_published", subject=subject, error=str(e))
