"""Keeps pages from being written into after they were taken back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager


class Fence:
    """Writers pass through `writing`; after `close` no new one gets in, and `quiet` is done once the last is out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self.quiet: Future[None] = Future()

    def open(self) -> bool:
        """Whether a writer inside may go on. Cheap: asked between pieces of a payload."""
        return not self._closed

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Yields False when the fence is closed: nothing may be written."""
        with self._lock:
            entered = not self._closed
            self._inside += entered
        try:
            yield entered
        finally:
            with self._lock:
                self._inside -= entered
                done = self._closed and not self._inside
            if done:
                self._be_quiet()

    def close(self) -> None:
        """Idempotent, from any thread."""
        with self._lock:
            self._closed = True
            done = not self._inside
        if done:
            self._be_quiet()

    async def wait_quiet(self, timeout_s: float | None = None) -> bool:
        """After close: True once nobody writes any more, False when that took longer than allowed."""
        if self.quiet.done():
            return True
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self.quiet)), timeout_s)
        except TimeoutError:
            return False
        return True

    def _be_quiet(self) -> None:
        with self._lock:
            if not self.quiet.done():
                self.quiet.set_result(None)
