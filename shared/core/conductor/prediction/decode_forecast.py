"""The batch of one decode node, now and at a moment to come.

The batch that runs now says too little: prompts that are being prefilled will join it (arXiv paper, section 7). The
forecast follows each sequence from its assignment to its landing and on to its end. Ages are counted in tokens, because
a longer batch makes tokens slower and answers no longer.

What a prompt will meet when it lands is answered by `landing`: all that runs and all that is on its way. It does not
count on places that free up meanwhile. Under load they are taken by prompts that arrive later and are prefilled
sooner. A forecast that leaves them to this prompt, as `at` does, admits long prompts whose prefill is then wasted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.conductor.prediction.output_lengths import OutputLengths
from shared.protocol.ids import AttemptId


@dataclass(slots=True, eq=False)
class _Coming:
    landing_s: float
    prompt_tokens: int
    assigned_s: float
    reported: bool = False


@dataclass(slots=True, eq=False)
class _Landed:
    prompt_tokens: int
    clock: float
    """The node's token clock at its landing."""
    assigned_s: float


class DecodeForecast:
    """The sequences of one life of a decode node. All times are the conductor's own clock."""

    __slots__ = ("_attempts", "_clock", "_clock_s", "_coming", "_landed", "_pending_s", "step_s")

    def __init__(self, pending_s: float) -> None:
        self._pending_s = pending_s
        self._coming: dict[AttemptId, _Coming] = {}
        self._landed: dict[AttemptId, _Landed] = {}
        self._attempts: Sequence[AttemptId] = ()
        self._clock = 0.0
        """Tokens that a sequence which always ran here would have made."""
        self._clock_s = 0.0
        self.step_s = 0.05
        """Predicted time of the step that runs now."""

    def assigned(self, attempt: AttemptId, now: float, landing_s: float, prompt_tokens: int) -> None:
        """Its KV is predicted to be there at `landing_s`."""
        if attempt not in self._landed:
            self._coming[attempt] = _Coming(landing_s, prompt_tokens, now)

    def released(self, attempt: AttemptId) -> None:
        """It does not come after all."""
        self._coming.pop(attempt, None)
        self._landed.pop(attempt, None)

    def reported(
        self,
        attempts: Sequence[AttemptId],
        step_s: float,
        mean_tokens: float,
        now: float,
        lengths: OutputLengths,
    ) -> None:
        """The node has these attempts and runs steps of `step_s`. `mean_tokens`: of a sequence whose assignment nobody
        here knows. What it no longer has ended, and tells `lengths` how long it was."""
        self._advance(now)
        self.step_s = max(step_s, 1e-6)
        if attempts is self._attempts or attempts == self._attempts:
            if len(self._landed) + len(self._coming) > len(attempts):
                self._forget_unreported(set(attempts), now)
            return
        self._attempts = attempts
        present = set(attempts)
        for attempt in [a for a in self._landed if a not in present]:
            lengths.observe(self._clock - self._landed.pop(attempt).clock)
        for attempt, coming in list(self._coming.items()):
            if attempt in present:
                coming.reported = True
            elif coming.reported or now - coming.assigned_s > self._pending_s:
                del self._coming[attempt]
        for attempt in attempts:
            if attempt not in self._landed and attempt not in self._coming:
                self._landed[attempt] = _Landed(int(mean_tokens), self._clock, now)

    def _forget_unreported(self, present: set[AttemptId], now: float) -> None:
        """Whoever was assigned and is in no report is not there, or was so briefly that nobody can say how long."""
        since_s = now - self._pending_s
        for attempt in [a for a, s in self._landed.items() if s.assigned_s < since_s and a not in present]:
            del self._landed[attempt]
        for attempt in [a for a, c in self._coming.items() if c.assigned_s < since_s and a not in present]:
            del self._coming[attempt]

    def now(self, now: float) -> tuple[float, float]:
        """(sequences, KV tokens) of the batch that runs."""
        self._advance(now)
        tokens = sum([s.prompt_tokens - s.clock for s in self._landed.values()])
        return float(len(self._landed)), tokens + self._clock * len(self._landed)

    def landing(self, now: float) -> tuple[float, float]:
        """(sequences, KV tokens) of the batch that a prompt placed now will meet when its prefill has ended."""
        requests, tokens = self.now(now)
        return requests + len(self._coming), tokens + sum([c.prompt_tokens for c in self._coming.values()])

    def at(self, when_s: float, now: float, lengths: OutputLengths) -> tuple[float, float]:
        """(sequences, KV tokens) expected of the batch at a moment not before `now`."""
        self._advance(now)
        clock = self._clock
        ahead = max(0.0, when_s - now) / self.step_s
        longer = lengths.longer
        requests = tokens = 0.0
        for s in self._landed.values():
            age = clock - s.clock
            stays = longer(age + ahead) / longer(age)
            requests += stays
            tokens += stays * (s.prompt_tokens + age + ahead)
        for c in self._coming.values():
            if c.landing_s <= when_s:
                age = (when_s - max(now, c.landing_s)) / self.step_s
                stays = longer(age)
                requests += stays
                tokens += stays * (c.prompt_tokens + age)
        return requests, tokens

    def drained_s(self, requests: float, now: float, lengths: OutputLengths) -> float:
        """Seconds until no more than so many sequences are expected, at most an hour."""
        wait_s = self.step_s
        while wait_s < 3600.0 and self.at(now + wait_s, now, lengths)[0] > requests:
            wait_s *= 1.5
        return wait_s

    def check(self) -> None:
        assert not self._coming.keys() & self._landed.keys(), "a sequence comes and has landed"

    def _advance(self, now: float) -> None:
        """Move the clock on, and land what has come."""
        if now <= self._clock_s:
            return
        self._clock += (now - self._clock_s) / self.step_s
        self._clock_s = now
        for attempt, coming in list(self._coming.items()):
            if coming.landing_s <= now:
                del self._coming[attempt]
                clock = self._clock - (now - coming.landing_s) / self.step_s
                self._landed[attempt] = _Landed(coming.prompt_tokens, clock, coming.assigned_s)
