"""Measures of a run: times to first token, times between tokens, reuse. Failures are counted separately."""

from __future__ import annotations

from collections import Counter
from math import ceil
from operator import itemgetter
from typing import Any

from shared.core.costs.model import compute_s
from shared.core.request.events import Deliver, Finish, Prefilled
from shared.protocol.cluster import CostCoefficients
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId
from tsukimi.simulate.predicted import PredictionErrors
from tsukimi.simulate.trace import TraceRequest

Interval = tuple[float, float, int]
"""(longest, shortest, how many) intervals between tokens that grow evenly."""

LONGEST_SHARE = 0.1
"""Share of a request's intervals, the longest ones, whose mean is its TBT, as in the papers."""


_how_many = itemgetter(2)


class _Story:
    """When an attempt's tokens came."""

    __slots__ = ("first_s", "intervals", "last_s")

    def __init__(self, first_s: float) -> None:
        self.first_s = self.last_s = first_s
        self.intervals: list[Interval] = []


class Measures:
    """Collects during the run; `summary` is for its end. The same run gives the same summary, bit for bit."""

    def __init__(self, requests: list[TraceRequest], cost: CostCoefficients) -> None:
        """`cost`: what computing a prompt takes."""
        self._requests = requests
        self._cost = cost
        self._wasted = 0
        self._wasted_s = 0.0
        self._ttft_s: dict[int, float] = {}
        self._tbt_s: dict[int, float] = {}
        self._ended: dict[int, Finish] = {}
        self._errors: Counter[str] = Counter()
        self._stories: dict[AttemptId, _Story] = {}
        self._predicted = PredictionErrors()

    @property
    def done(self) -> int:
        return len(self._ended) + sum(self._errors.values())

    # -- what happened -----------------------------------------------------------------------------------------------

    def ran(
        self,
        attempts: list[AttemptId],
        started_s: float,
        ended_s: float,
        steps: int,
        step_s: float,
        growth_s: float,
    ) -> None:
        """An engine ran `steps` steps, each a little longer than the last. Each step gave each sequence one token."""
        all_of_them = (step_s + growth_s * (steps - 1), step_s, steps)
        known = self._stories.get
        for attempt in attempts:
            story = known(attempt)
            if story is None:
                self._stories[attempt] = _Story(ended_s)
                continue
            if story.last_s == started_s:  # it was in the previous run, too
                story.intervals.append(all_of_them)
            else:
                gap_s = started_s + step_s - story.last_s
                story.intervals.append((gap_s, gap_s, 1))
                if steps > 1:
                    story.intervals.append((all_of_them[0], step_s + growth_s, steps - 1))
            story.last_s = ended_s

    def delivered(self, number: int, command: Deliver, now: float) -> None:
        if command.index == 0:
            self._ttft_s[number] = now - self._requests[number].arrival_s

    def finished(
        self, number: int, attempt: AttemptId, command: Finish, prefilled: Prefilled | None = None
    ) -> None:
        """`prefilled`: what computing the prompt took, beside its prediction."""
        self._ended[number] = command
        story = self._stories.pop(attempt, None)
        tbt_s = None
        if story is not None and story.intervals:
            self._tbt_s[number] = mean_of_longest(story.intervals)
            tbt_s = (story.last_s - story.first_s) / sum(map(_how_many, story.intervals))
        if prefilled is not None:
            self._predicted.took(prefilled, tbt_s)

    def failed(self, number: int, error: WireError, cached_tokens: int | None = None) -> None:
        """The request failed. Its times are not counted. `cached_tokens`: reused of its prompt; None: the prompt was not
        computed, so that nothing is wasted."""
        self._errors[error.code] += 1
        self._ttft_s.pop(number, None)
        if cached_tokens is not None:
            self._wasted += 1
            prompt = self._requests[number].prompt_tokens
            self._wasted_s += compute_s(self._cost, cached_tokens, prompt - cached_tokens)

    # -- the whole ---------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        prompt = sum(f.prompt_tokens for f in self._ended.values())
        cached = sum(f.cached_tokens for f in self._ended.values())
        rejected = self._errors["overloaded"]
        return {
            "requests": len(self._requests),
            "completed": len(self._ended),
            "rejected": rejected,
            "failed": sum(self._errors.values()) - rejected,
            "errors": dict(sorted(self._errors.items())),
            "wasted_prefills": self._wasted,
            "wasted_prefill_s": self._wasted_s,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "output_tokens": sum(f.completion_tokens for f in self._ended.values()),
            "hit_rate": cached / prompt if prompt else 0.0,
            "ttft_s": spread(list(self._ttft_s.values())),
            "tbt_s": spread(list(self._tbt_s.values())),
            "predicted": self._predicted.summary(),
        }

    def goodput(self, ttft_s: float, tbt_s: float) -> float:
        """Share of all requests, failed ones included, that met both objectives (0 for one that is not set)."""
        good = 0
        for number in self._ended:
            in_time = not ttft_s or self._ttft_s[number] <= ttft_s
            good += in_time and (not tbt_s or self._tbt_s.get(number, 0.0) <= tbt_s)
        return good / len(self._requests) if self._requests else 0.0


def mean_of_longest(intervals: list[Interval]) -> float:
    """Mean of the longest tenth of the intervals. Runs of evenly growing intervals are taken from their long end."""
    count: int = sum(map(_how_many, intervals))
    wanted = left = max(1, ceil(count * LONGEST_SHARE))
    total = 0.0
    for longest, shortest, n in sorted(intervals, reverse=True):
        take = min(n, left)
        growth = (longest - shortest) / (n - 1) if n > 1 else 0.0
        total += take * longest - growth * (take * (take - 1) / 2)
        left -= take
        if not left:
            break
    return total / wanted


def spread(values: list[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank); zeros for no values."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    values.sort()
    ranks = {f"p{p}": values[ceil(len(values) * p / 100) - 1] for p in (50, 90, 99)}
    return {"mean": sum(values) / len(values)} | ranks
