"""An event loop in virtual time: when nothing is ready, its clock jumps to the next timer.

Hours pass in milliseconds, and always in the same order. When nothing is ready and no timer is set, nothing can ever
happen again: the loop raises Deadlock instead of hanging. Only for code without threads and sockets, whose
clock is `loop.time` (give it to Driver and friends as `clock`).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits for something that can no longer happen."""


class _Jump(selectors.DefaultSelector):
    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock(f"nothing is ready and no timer is set at {self.loop.time():.6f} s")
        if not ready and timeout is not None and timeout > 0:
            self.loop.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, start_s: float = 0.0) -> None:
        selector = _Jump()
        selector.loop = self
        self.now = start_s
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time, starting at 0 s."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
