"""Rooms that prefill nodes write KV into: from the data plane's words to the machine's events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from shared.core.worker.transfers import (
    CloseLanding,
    LandingArrived,
    LandingClosed,
    LandingFailed,
    LandingProgressed,
    OpenLanding,
)
from shared.dataplane.api import DataPlane, LandingCommit
from shared.protocol.errors import Invalid
from shared.protocol.handoff import HandoffInfo
from shared.protocol.ids import AttemptId, LandingId
from shared.protocol.wire import decode

log = structlog.get_logger(__name__)


class Landings:
    """On the event loop's thread. Each opened landing ends in one event, unless it is closed: then that is it."""

    def __init__(self, plane: DataPlane, feed: Callable[[Any], None]) -> None:
        self._plane = plane
        self._feed = feed
        self._open: dict[LandingId, AttemptId] = {}
        self._arrived: dict[LandingId, int] = {}
        """Slices of each at the last look."""
        self.first_slice_at = 0.0
        """time.monotonic() when the first slice of the latest landing had arrived."""

    def open(self, command: OpenLanding) -> None:
        self._open[command.landing] = command.attempt
        self._plane.open_landing(command.landing, command.pages, self._on_commit)

    async def close(self, command: CloseLanding) -> LandingClosed:
        self._forget(command.landing)
        await self._plane.close_landing(command.landing)
        return LandingClosed(command.attempt)

    def look(self) -> None:
        """Tell of those that got more since the last look."""
        for landing, attempt in list(self._open.items()):
            stats = self._plane.landing_stats(landing)
            if stats is not None and stats.slices != self._arrived.get(landing, 0):
                self._arrived[landing] = stats.slices
                self._feed(LandingProgressed(attempt))

    def _on_commit(self, commit: LandingCommit) -> None:
        attempt = self._open.get(commit.landing)
        if attempt is None:
            return
        stats = self._plane.landing_stats(commit.landing)
        if stats is not None:
            self.first_slice_at = stats.first_slice_at
        self._forget(commit.landing)
        self._feed(ending(attempt, commit))

    def _forget(self, landing: LandingId) -> None:
        self._open.pop(landing, None)
        self._arrived.pop(landing, None)


def ending(attempt: AttemptId, commit: LandingCommit) -> LandingArrived | LandingFailed:
    if not commit.ok:
        log.warning("landing_failed", attempt=attempt, error=commit.error)
        return LandingFailed(attempt, commit.error)
    try:
        info: HandoffInfo = decode(commit.info, HandoffInfo)
    except Invalid as e:
        log.error("landing_unreadable", attempt=attempt, error=e.message)
        return LandingFailed(attempt, e.message)
    return LandingArrived(attempt, info.first_token, info.first_logprob, info.cached_tokens)
