"""Early refusal: a request is refused if it is predicted to miss an objective.

A prediction can be wrong, and a wrong one must not starve an idle cluster. Therefore, while nodes are idle, a fitted time
model with too few measurements refuses nothing, and one with enough may refuse only a share of what arrives. Requests
that are let through are measured, which corrects the model.

A time model that is given, not fitted, is exact and needs no correction. It refuses everything over an objective.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from shared.core.conductor.objectives import Objectives
from shared.protocol.errors import retry_within_reason

Cause = Literal["ttft", "wait", "tbt"]


@dataclass(slots=True, frozen=True)
class Outlook:
    """What is predicted for one request on the nodes chosen for it."""

    ttft_s: float
    tbt_s: float
    """Of the batch that the admission mode looks at; 0 where it looks at none."""
    queue_s: float
    """Part of ttft_s: what passes before its own work begins."""
    samples: int
    """Number of measurements behind a fitted time model; with several models, the smallest of these numbers."""
    idle: bool
    """Whether idle nodes could serve it."""
    exact: bool = False
    """Whether all time models behind the prediction are given, and none is fitted."""
    drained_s: float = 1.0
    """Seconds until the decode node is expected to have room under the objective."""


@dataclass(slots=True, frozen=True)
class Refusal:
    cause: Cause
    reason: str
    retry_after_s: float


class Admission:
    """Judges one request at a time. Remembers only the last `window` verdicts of fitted models while nodes were idle."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self._idle_verdicts: deque[bool] = deque(maxlen=objectives.window)
        self.let_through = 0
        """Requests predicted to be over an objective but taken: failovers, and those whose prediction was not trusted."""
        self.refused: Counter[Cause] = Counter()
        """By cause. In shadow mode: those that would have been refused."""

    def judge(self, outlook: Outlook, *, retry: bool = False) -> Refusal | None:
        """Returns None if the request is taken. `retry`: failover of a request already being answered; always taken.
        In shadow mode the caller takes what is refused, too."""
        refusal = self._over(outlook)
        if refusal is not None and (retry or self._doubtful(outlook)):
            self.let_through += 1
            refusal = None
        if outlook.idle and not outlook.exact:
            self._idle_verdicts.append(refusal is not None)
        if refusal is not None:
            self.refused[refusal.cause] += 1
        return refusal

    def _over(self, outlook: Outlook) -> Refusal | None:
        limits = self.objectives
        if 0.0 < limits.ttft_s < outlook.ttft_s:
            excess_s = min(outlook.ttft_s - limits.ttft_s, outlook.queue_s)
            return Refusal(
                "ttft",
                f"predicted TTFT {outlook.ttft_s:.2f} s is over the objective of {limits.ttft_s:g} s",
                retry_after(excess_s),
            )
        if 0.0 < limits.max_wait_s < outlook.queue_s:
            return Refusal(
                "wait",
                f"predicted wait {outlook.queue_s:.2f} s is over the limit of {limits.max_wait_s:g} s",
                retry_after(outlook.queue_s - limits.max_wait_s),
            )
        if 0.0 < limits.tbt_most_s < outlook.tbt_s:
            return Refusal(
                "tbt",
                f"predicted TBT {outlook.tbt_s:.3f} s is over {limits.tbt_fill:.0%} of the objective of "
                f"{limits.tbt_s:g} s",
                retry_after(outlook.drained_s),
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
    """Clamp a predicted wait to what clients may be told (protocol.errors), in seconds to the millisecond."""
    return round(retry_within_reason(seconds), 3)
