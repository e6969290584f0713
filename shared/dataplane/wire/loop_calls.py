"""The way from the data plane's threads to the event loop's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


class LoopCalls:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def soon(self, call: Callable[..., Any], *args: Any) -> None:
        """Run it on the loop's thread, in the order asked for. Dropped when the loop is over: so is the process."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)
