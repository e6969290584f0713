"""What waits for one client: bounded, and the slower it reads the fewer, larger pieces it gets."""

from __future__ import annotations

import asyncio
from typing import Literal

from msgspec import Struct

from shared.protocol.errors import TsukimiError
from shared.protocol.sampling import TokenLogprob

FinishReason = Literal["stop", "length"]
LOGPROB_BYTES = 64
"""Roughly what one token's logprob takes on its way out."""


class TokenEntry(Struct, frozen=True):
    """One token of the answer, with its logprob and where its text begins."""

    token: int
    logprob: TokenLogprob
    text_offset: int


class Update(Struct):
    """News of one choice since the last."""

    choice: int
    text: str = ""
    entries: list[TokenEntry] = []
    """Empty unless logprobs are wanted."""
    ids: list[int] = []
    """All tokens made, told or not; empty unless wanted."""
    finish: FinishReason | None = None

    @property
    def size_bytes(self) -> int:
        return (
            len(self.text)
            + 8 * len(self.ids)
            + LOGPROB_BYTES * sum(1 + len(e.logprob.top) for e in self.entries)
        )


class Outbox:
    """Filled by the choices, emptied by a front. Not thread-safe."""

    def __init__(self, choices: int) -> None:
        self._waiting: dict[int, Update] = {}
        self._open = choices
        self._error: TsukimiError | None = None
        self._news = asyncio.Event()
        self.size_bytes = 0

    @property
    def ended(self) -> bool:
        """Everything there will ever be has been taken."""
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
        self._news.set()

    def fail(self, error: TsukimiError) -> None:
        """The first error counts; what waits before it can still be taken."""
        self._error = self._error or error
        self._news.set()

    async def take(self, timeout_s: float) -> list[Update]:
        """All news, or none at the time-out. Raises the error once there is nothing before it."""
        if not self._news.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        updates = list(self._waiting.values())
        self._waiting.clear()
        self.size_bytes = 0
        if not updates and self._error is not None:
            raise self._error
        if self._error is None:
            self._news.clear()
        return updates
