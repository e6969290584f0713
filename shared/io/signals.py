"""SIGTERM and SIGINT as something to wait for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Stop:
    """A request that this process end. The first signal asks; the second one ends it at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def ask(self) -> None:
        self._asked.set()

    async def wait(self) -> None:
        await self._asked.wait()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run the work, but cancel it and return None once asked to stop."""
        running = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            return None
        finally:
            for task in (running, asked):
                task.cancel()
            await asyncio.gather(running, asked, return_exceptions=True)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.asked:
            log.warning("second_signal", signal=name)
            os._exit(1)
        log.info("stop_asked", signal=name)
        self.ask()
