"""Landings that the process itself opens, for KV handed over to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.dataplane.api import CommitReply, LandingCommit, LandingStats
from shared.dataplane.server.landing import Landing, LandingTable, Reply
from shared.dataplane.wire.loop_calls import LoopCalls
from shared.protocol.ids import LandingId


class HandoffEnding:
    """Judges on commit: every slice of every block, or it is not ok."""

    def __init__(
        self, on_commit: Callable[[LandingCommit], None], table: LandingTable, calls: LoopCalls
    ) -> None:
        self._on_commit = on_commit
        self._table = table
        self._calls = calls
        self.abandoned = False
        """Set on the loop's thread: the owner has closed the landing and wants to hear nothing more."""

    def committed(self, landing: Landing, blocks: int, info: bytes, reply: Reply) -> None:
        error = landing.flaw(blocks)
        if blocks > len(landing.pages):
            error = f"block {len(landing.pages)} has no room in this landing"
        self._calls.soon(self._tell, LandingCommit(landing.id, not error, info, error))
        reply(CommitReply(not error, error))

    def failed(self, landing: Landing, error: str) -> None:
        self._calls.soon(self._tell, LandingCommit(landing.id, False, b"", error))

    def _tell(self, commit: LandingCommit) -> None:
        try:
            if not self.abandoned:
                self._on_commit(commit)
        finally:
            self._table.remove(commit.landing)


class Handoffs:
    """On the loop's thread."""

    def __init__(self, table: LandingTable, calls: LoopCalls) -> None:
        self._table = table
        self._calls = calls

    def open(
        self,
        landing: LandingId,
        pages: Sequence[int],
        layers: int,
        on_commit: Callable[[LandingCommit], None],
    ) -> None:
        ending = HandoffEnding(on_commit, self._table, self._calls)
        self._table.add(Landing(landing, dict(enumerate(pages)), layers, ending))

    def stats(self, landing: LandingId) -> LandingStats | None:
        found = self._table.get(landing)
        return found.stats() if found is not None else None
