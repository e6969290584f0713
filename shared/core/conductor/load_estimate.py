"""The conductor's estimate of a node's load: its last report, plus what has been assigned to it since."""

from __future__ import annotations

from dataclasses import dataclass

from shared.protocol.cluster import NodeLoad
from shared.protocol.ids import AttemptId

PENDING_S = 2.0
"""Seconds an assignment counts without appearing in a report. After that it is taken as lost or already over."""
STALE_S = 5.0
"""Seconds after which a report no longer counts."""


@dataclass(slots=True, frozen=True)
class Assignment:
    at_s: float
    work_s: float
    tokens: int


class LoadEstimate:
    """The load of one life of a node. A report replaces the previous one. Each assignment is added on top until a report
    includes it or PENDING_S has passed. The counts are as of the last call that took a time."""

    __slots__ = (
        "_pending",
        "_report",
        "_reported_s",
        "_stale_s",
        "busy_until_s",
        "held_blocks",
        "kv_tokens",
        "pending_tokens",
        "requests",
        "settled_until_s",
        "waiting",
    )  # fmt: skip

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._pending: dict[AttemptId, Assignment] = {}
        self._report: NodeLoad | None = None
        self._reported_s = float("-inf")
        self.busy_until_s = float("-inf")
        """When all its reported and assigned work is predicted to be done."""
        self.settled_until_s = float("inf")
        """Until when the counts stay right without a report or assignment. After that, call `settle`."""
        self.requests = 0
        """Attempts reported or assigned."""
        self.waiting = 0
        self.kv_tokens = 0
        self.pending_tokens = 0
        """The part of kv_tokens that comes from assignments not yet reported."""
        self.held_blocks = 0
        """As reported."""

    def reported(self, load: NodeLoad, now: float) -> None:
        """Take a load report. Reports must come in order of their seq."""
        pending = self._pending
        if pending:
            for attempt in load.attempts:
                pending.pop(attempt, None)
        self._report, self._reported_s = load, now
        self.busy_until_s = now + load.queue_s
        if pending:
            self._count(now)
            for assignment in pending.values():
                self.busy_until_s += assignment.work_s
            return
        self.requests, self.waiting = len(load.attempts), load.waiting
        self.kv_tokens, self.pending_tokens = load.batch_tokens, 0
        self.held_blocks = load.kv_blocks_held
        self.settled_until_s = now + self._stale_s

    def assigned(self, attempt: AttemptId, now: float, work_s: float, tokens: int) -> None:
        """Add an assignment. Harmless if the attempt is already reported; a repeat replaces the earlier one."""
        if self._report is not None and attempt in self._report.attempts:
            return
        again = self._pending.pop(attempt, None) is not None
        self._pending[attempt] = Assignment(now, work_s, tokens)
        self.busy_until_s = (self.busy_until_s if self.busy_until_s > now else now) + work_s
        if again or now > self.settled_until_s:
            self._count(now)
            return
        self.requests += 1
        self.waiting += 1
        self.kv_tokens += tokens
        self.pending_tokens += tokens
        if now + PENDING_S < self.settled_until_s:
            self.settled_until_s = now + PENDING_S

    def released(self, attempt: AttemptId, now: float) -> None:
        """Take an assignment back. Harmless if there is none, or if it is reported already."""
        assignment = self._pending.pop(attempt, None)
        if assignment is not None:
            self.busy_until_s -= assignment.work_s
            self._count(now)

    def queue_s(self, now: float) -> float:
        """Predicted seconds until work assigned now would start. It shrinks as time passes."""
        return max(0.0, self.busy_until_s - now)

    def settle(self, now: float) -> None:
        """Drop assignments and a report that are too old. Needed only after `settled_until_s`."""
        self._count(now)

    def check(self) -> None:
        reported = self._report.attempts if self._report is not None else ()
        assert not self._pending.keys() & set(reported), "counted twice"
        assert self.requests == len(self._pending) + len(reported), "requests do not add up"
        assert self.pending_tokens == sum(a.tokens for a in self._pending.values()), "tokens do not add up"

    def _count(self, now: float) -> None:
        if self._report is not None and now - self._reported_s > self._stale_s:
            self._report = None
        pending, tokens, until = self._pending, 0, float("inf")
        while pending:
            attempt, oldest = next(iter(pending.items()))
            if now - oldest.at_s <= PENDING_S:
                tokens = sum([a.tokens for a in pending.values()])
                until = oldest.at_s + PENDING_S
                break
            del pending[attempt]
        self.requests = self.waiting = len(pending)
        self.kv_tokens = self.pending_tokens = tokens
        self.held_blocks = 0
        if report := self._report:
            self.requests += len(report.attempts)
            self.waiting += report.waiting
            self.kv_tokens += report.batch_tokens
            self.held_blocks = report.kv_blocks_held
            until = min(until, self._reported_s + self._stale_s)
        self.settled_until_s = until
