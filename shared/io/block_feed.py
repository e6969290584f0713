"""A node's block events on the bus, in the order in which they were decided."""

from __future__ import annotations

import asyncio

import structlog

from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, snapshot_parts
from shared.io.bus import Bus
from shared.protocol import subjects
from shared.protocol.cluster import BlockEvents
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import Incarnation, NodeId

WAITING_LIMIT = 1024

log = structlog.get_logger(__name__)


class BlockFeed:
    """Events that cannot be sent are dropped. The gap in their numbers makes listeners ask for a snapshot."""

    def __init__(self, bus: Bus, node: NodeId, incarnation: Incarnation) -> None:
        self._bus = bus
        self._node = node
        self._incarnation = incarnation
        self._subject = subjects.blocks(node)
        self._waiting: asyncio.Queue[PublishBlocks | PublishSnapshot] = asyncio.Queue(WAITING_LIMIT)
        self.dropped = 0

    def publish(self, command: PublishBlocks | PublishSnapshot) -> None:
        """Returns at once."""
        try:
            self._waiting.put_nowait(command)
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        """Send without end; run it in the task group."""
        while True:
            command = await self._waiting.get()
            try:
                await self._send(command)
            except TsukimiError as e:
                self.dropped += 1
                log.warning("block_events_dropped", seq=command.seq, error=e.message)

    async def _send(self, command: PublishBlocks | PublishSnapshot) -> None:
        if isinstance(command, PublishBlocks):
            await self._bus.publish(
                self._subject,
                BlockEvents(self._node, self._incarnation, command.seq, command.stored, command.removed),
            )
            return
        limit = self._bus.max_payload_bytes
        for part in snapshot_parts(self._node, self._incarnation, command.seq, command.keys, limit):
            await self._bus.publish(self._subject, part)
