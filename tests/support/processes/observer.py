"""Watches a cluster's bus: announcements, heartbeats and departures. Usable from sync tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.io.nats_bus import NatsBus, connect
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall

T = TypeVar("T")


class Observer:
    """Runs its own event loop in a thread, so its maps stay current while a test blocks or runs another loop."""

    def __init__(self, url: str) -> None:
        self.infos: dict[str, NodeInfo] = {}
        """Node -> its last announcement. Removed when it leaves."""
        self.loads: dict[str, NodeLoad] = {}
        """Node -> its last heartbeat. Removed when it leaves."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="observer", daemon=True)
        self._thread.start()
        self._bus: NatsBus = self.call(connect(url, name="observer"))
        self.call(self._subscribe())

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        """Run a coroutine on the observer's loop; the calling thread waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def publish(self, subject: str, message: Any) -> None:
        self.call(self._bus.publish(subject, message))

    def request(self, subject: str, message: Any, reply: Any, timeout_s: float = 10.0) -> Any:
        return self.call(self._bus.request(subject, message, reply, timeout_s), timeout_s + 5.0)

    def roll_call(self) -> None:
        """Ask every node to announce itself."""
        self.publish(subjects.ROLL_CALL, RollCall("observer"))

    def close(self) -> None:
        self.call(self._bus.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _subscribe(self) -> None:
        self._bus.on_connection(self._on_connection)
        await self._bus.subscribe_ordered(subjects.ANNOUNCE, NodeInfo, self._on_info)
        await self._bus.subscribe_ordered(subjects.HEARTBEAT_ALL, NodeLoad, self._on_load)
        await self._bus.subscribe_ordered(subjects.LEAVE, NodeLeft, self._on_left)
        await self._bus.publish(subjects.ROLL_CALL, RollCall("observer"))

    def _on_connection(self, up: bool) -> None:
        """After a reconnect, ask all nodes to announce themselves: announcements may have been missed."""
        if up:
            self._roll_call = self._loop.create_task(
                self._bus.publish(subjects.ROLL_CALL, RollCall("observer"))
            )

    def _on_info(self, info: NodeInfo) -> None:
        self.infos[info.ref.node] = info

    def _on_load(self, load: NodeLoad) -> None:
        self.loads[load.node] = load

    def _on_left(self, left: NodeLeft) -> None:
        known = self.infos.get(left.node)
        if known is not None and known.ref.incarnation == left.incarnation:
            self.infos.pop(left.node, None)
            self.loads.pop(left.node, None)
