"""Whether a request is taken: the test of its predicted TTFT and TBT against the objectives, and early refusal.

A prediction can be wrong. So that a wrong one never starves a cluster that has nothing to do, nothing is refused on a
model that has hardly been measured while nodes are idle, and even a measured one may refuse only a share of what
arrives while nodes are idle: what is let in anyway is measured, which mends the model.

A model that is given, not fitted, is exact: there is nothing to mend. It refuses all that is over an objective.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shared.core.conductor.objectives import Objectives
from shared.protocol.errors import retry_within_reason

TYPICAL_TOKENS = 128
"""What a running sequence is taken to have left, for want of knowing."""


@dataclass(slots=True, frozen=True)
class Outlook:
    """What is predicted for one request on the nodes chosen for it."""

    ttft_s: float
    tbt_s: float
    queue_s: float
    decoding: int
    """Sequences on the decode node."""
    samples: int
    """Measurements behind the least measured of the fitted time models."""
    idle: bool
    """Nodes stand idle that could serve it."""
    exact: bool = False
    """All time models behind it are given, none is fitted."""


@dataclass(slots=True, frozen=True)
class Refusal:
    reason: str
    retry_after_s: float


class Admission:
    """Judges one request at a time; remembers only how often fitted models lately refused while nodes were idle."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self._idle_verdicts: deque[bool] = deque(maxlen=objectives.window)
        self.let_through = 0
        """Requests over an objective that were taken because the prediction was not to be trusted."""

    def judge(self, outlook: Outlook, *, retry: bool = False) -> Refusal | None:
        """None: take it. A failover of a request already being answered is always taken."""
        refusal = self._over(outlook)
        if refusal is not None and (retry or self._doubtful(outlook)):
            self.let_through += 1
            refusal = None
        if outlook.idle and not outlook.exact:
            self._idle_verdicts.append(refusal is not None)
        return refusal

    def _over(self, outlook: Outlook) -> Refusal | None:
        limits = self.objectives
        if 0.0 < limits.ttft_s < outlook.ttft_s:
            excess_s = min(outlook.ttft_s - limits.ttft_s, outlook.queue_s)
            return Refusal(
                f"predicted TTFT {outlook.ttft_s:.2f} s is over the objective of {limits.ttft_s:g} s",
                retry_after(excess_s),
            )
        if 0.0 < limits.tbt_s < outlook.tbt_s:
            one_ends_s = outlook.tbt_s * TYPICAL_TOKENS / max(1, outlook.decoding)
            return Refusal(
                f"predicted TBT {outlook.tbt_s:.3f} s is over the objective of {limits.tbt_s:g} s",
                retry_after(one_ends_s),
            )
        return None

    def _doubtful(self, outlook: Outlook) -> bool:
        if outlook.exact or not outlook.idle:
            return False
        if outlook.samples < self.objectives.min_samples:
            return True
        refused = sum(self._idle_verdicts) + 1
        return refused > self.objectives.idle_refusals * (len(self._idle_verdicts) + 1)


def retry_after(seconds: float) -> float:
    """Within reason, to the millisecond."""
    return round(retry_within_reason(seconds), 3)
