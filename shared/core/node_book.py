"""What the conductor counts on a node having to do: what it last reported, plus what was sent its way since."""

from __future__ import annotations

from msgspec import Struct

from shared.protocol.cluster import NodeLoad
from shared.protocol.ids import AttemptId

PENDING_S = 2.0
"""An assignment that the node does not report by then never reached it, or is over."""
STALE_S = 5.0
"""A report older than that says nothing any more."""


class Assignment(Struct, frozen=True):
    at_s: float
    work_s: float
    tokens: int


class NodeBook:
    """One life of a node. Reports replace what they cover; what is assigned meanwhile is added until it shows up in a
    report, or has grown too old to be true."""

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._pending: dict[AttemptId, Assignment] = {}
        self._report: NodeLoad | None = None
        self._reported_s = float("-inf")
        self._busy_until_s = float("-inf")
        self._pending_tokens = 0

    def reported(self, load: NodeLoad, now: float) -> None:
        """Load reports come in order of their seq."""
        for attempt in load.attempts:
            self._drop(attempt)
        self._expire(now)
        self._report, self._reported_s = load, now
        self._busy_until_s = now + load.queue_s + sum(a.work_s for a in self._pending.values())

    def assigned(self, attempt: AttemptId, now: float, work_s: float, tokens: int) -> None:
        """Harmless when the same attempt is assigned again."""
        self._expire(now)
        self._drop(attempt)
        self._pending[attempt] = Assignment(now, work_s, tokens)
        self._pending_tokens += tokens
        self._busy_until_s = max(self._busy_until_s, now) + work_s

    def queue_s(self, now: float) -> float:
        """Predicted seconds until work assigned now would start; time that passes drains it."""
        return max(0.0, self._busy_until_s - now)

    def requests(self, now: float) -> int:
        """Attempts it has or is about to have."""
        self._expire(now)
        report = self._fresh(now)
        return len(self._pending) + (len(report.attempts) if report else 0)

    def waiting(self, now: float) -> int:
        self._expire(now)
        report = self._fresh(now)
        return len(self._pending) + (report.waiting if report else 0)

    def kv_tokens(self, now: float) -> int:
        report = self._fresh(now)
        return self._pending_tokens + (report.batch_tokens if report else 0)

    def free_blocks(self, now: float, kv_blocks: int, block_tokens: int) -> int:
        report = self._fresh(now)
        held = report.kv_blocks_held if report else 0
        return kv_blocks - held - self._pending_tokens // block_tokens

    def check(self) -> None:
        assert self._pending_tokens == sum(a.tokens for a in self._pending.values()), (
            "pending tokens do not add up"
        )
        if self._report is not None:
            assert not self._pending.keys() & set(self._report.attempts), "counted twice"

    def _fresh(self, now: float) -> NodeLoad | None:
        return self._report if now - self._reported_s <= self._stale_s else None

    def _drop(self, attempt: AttemptId) -> None:
        if gone := self._pending.pop(attempt, None):
            self._pending_tokens -= gone.tokens

    def _expire(self, now: float) -> None:
        while self._pending:
            attempt, oldest = next(iter(self._pending.items()))
            if now - oldest.at_s <= PENDING_S:
                return
            self._drop(attempt)
