"""A worker's tokens on the bus: one message per step and gateway, in the order in which they were made."""

from __future__ import annotations

import asyncio

import structlog

from shared.core.worker.events import SendTokens
from shared.io.bus import Bus
from shared.protocol import subjects
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import Incarnation, NodeId
from shared.protocol.requests import TokenBatch

WAITING_LIMIT = 4096

log = structlog.get_logger(__name__)


class TokenFeed:
    """Messages that cannot be sent are dropped and counted. The gateway sees the gap or the silence, and asks."""

    def __init__(self, bus: Bus, node: NodeId, incarnation: Incarnation) -> None:
        self._bus = bus
        self._node = node
        self._incarnation = incarnation
        self._waiting: asyncio.Queue[SendTokens] = asyncio.Queue(WAITING_LIMIT)
        self.dropped = 0

    def publish(self, command: SendTokens) -> None:
        """Returns at once."""
        try:
            self._waiting.put_nowait(command)
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        """Send without end; run it in the task group."""
        while True:
            command = await self._waiting.get()
            batch = TokenBatch(self._node, self._incarnation, command.deltas)
            try:
                await self._bus.publish(subjects.tokens(command.gateway), batch)
            except TsukimiError as e:
                self.dropped += 1
                log.warning("tokens_dropped", gateway=command.gateway, error=e.message)
            finally:
                self._waiting.task_done()

    async def flushed(self) -> None:
        """Return when everything published has been sent."""
        await self._waiting.join()
        await self._bus.flush()
