"""What waits for one client. It is bounded. A client that reads slowly gets fewer and larger pieces."""

from __future__ import annotations

import asyncio

from services.gateway.api.answer import Update
from shared.protocol.errors import TsukimiError


class Outbox:
    """Filled by the choices, emptied by a front. Not thread-safe."""

    def __init__(self, choices: int) -> None:
        self._waiting: dict[int, Update] = {}
        self._open = choices
        self._error: TsukimiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self.size_bytes = 0

    @property
    def ended(self) -> bool:
        """Whether everything has been taken and nothing more will come."""
        return self._open == 0 and not self._waiting

    def put(self, update: Update) -> None:
        waiting = self._waiting.get(update.choice)
        if waiting is None:
            self._waiting[update.choice] = update
        else:
            waiting.text += update.text
            waiting.entries += update.entries
            waiting.ids += update.ids
            waiting.finish = update.finish
        self.size_bytes += update.size_bytes
        self._open -= update.finish is not None
        self._wake()

    def fail(self, error: TsukimiError) -> None:
        """The first error counts. What was put before it can still be taken."""
        self._error = self._error or error
        self._wake()

    async def take(self, timeout_s: float) -> list[Update]:
        """All news; empty at the time-out. Raises the error once everything before it has been taken."""
        if not self._waiting and self._error is None:
            await self._wait(timeout_s)
        updates = list(self._waiting.values())
        self._waiting.clear()
        self.size_bytes = 0
        if not updates and self._error is not None:
            raise self._error
        return updates

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- waiting: one timer, moved on only when it rings, since nearly every wait ends before it -------------------------

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._due = loop.time() + timeout_s
        if self._timer is None or self._timer.when() > self._due:
            self.close()
            self._timer = loop.call_later(timeout_s, self._ring)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._waiter is not None and loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._ring)
        else:
            self._wake()
