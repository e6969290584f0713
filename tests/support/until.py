"""Waiting for what sends no event. The time-out is only there to end a failing test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return once it holds; TimeoutError at the time-out."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  (there is nothing to wait on)
            await asyncio.sleep(0.002)
