"""An engine that takes the time the cost model says, and computes nothing.

Repeated pure decode steps are one event, computed in closed form. An interrupt ends them after the running step, as in
a real engine.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.core.costs.model import mixed_s, repeat_s, step_s, steps_within
from shared.core.worker.steps import InterruptRun, RunStep, SequenceResult, StepDone
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import AttemptId
from tsukimi.simulate.cores import SharedCores
from tsukimi.simulate.timeline import Timeline

TOKEN = 1
"""The token that every sequence samples at every step."""

Ran = Callable[[list[AttemptId], float, float, int, float, float], None]
"""(sequences that sampled, run's start and end, steps, seconds of the first step, growth of each next one)."""


class _Run:
    __slots__ = ("began_s", "command", "factor", "growth_s", "kv_tokens", "started_s", "step_s", "steps")

    def __init__(self, command: RunStep, started_s: float, began_s: float) -> None:
        self.command = command
        self.started_s = started_s
        self.began_s = began_s
        """By the engine's clock of work."""
        self.factor = 1.0
        self.steps = 1
        self.step_s = 0.0
        self.growth_s = 0.0
        self.kv_tokens = 0


class CostEngine:
    """One engine, with at most one running step. `done` gets each StepDone; `ran` gets what ran, for statistics."""

    def __init__(
        self,
        cost: CostCoefficients,
        timeline: Timeline,
        done: Callable[[StepDone], None],
        ran: Ran,
        cores: SharedCores | None = None,
        noise: Callable[[], float] | None = None,
    ) -> None:
        """`cores`: what it shares with other engines; None: it has its machine to itself. `noise`: draws by which factor
        a run takes longer or shorter than the cost model says."""
        self._cost = cost
        self._timeline = timeline
        self._cores = cores
        self._noise = noise
        self._work: Timeline | SharedCores = timeline if cores is None else cores
        self._done = done
        self._ran = ran
        self._run: _Run | None = None
        self.busy_s = 0.0

    def start(self, command: RunStep) -> None:
        assert self._run is None, "a step is out"
        if self._cores is not None:
            self._cores.begin()
        run = _Run(command, self._timeline.now, self._work.now)
        if self._noise is not None:
            run.factor = self._noise()
        if command.up_to > 1:
            self._repeat(run)
        else:
            self._once(run)
        self._run = run
        self._end_after(run, run.steps)

    def _repeat(self, run: _Run) -> None:
        """Only pure decode steps are repeated."""
        sequences, cost = run.command.sequences, self._cost
        run.kv_tokens = sum([s.start for s in sequences]) + len(sequences)
        run.steps = run.command.up_to
        run.step_s = step_s(cost, len(sequences), run.kv_tokens)
        run.growth_s = cost.step_token_s * len(sequences)

    def _once(self, run: _Run) -> None:
        chunks, decoding = [], 0
        for s in run.command.sequences:
            if s.token_ids:  # a prompt has none here
                run.kv_tokens += s.start + 1
                decoding += 1
            else:
                chunks.append((s.start, s.tokens))
        if chunks:
            run.step_s = mixed_s(self._cost, chunks, decoding, run.kv_tokens)
        else:
            run.step_s = step_s(self._cost, decoding, run.kv_tokens)
            run.growth_s = self._cost.step_token_s * decoding

    def interrupt(self, command: InterruptRun) -> None:
        run = self._run
        if run is None or run.command.step != command.step or run.steps == 1:
            return
        elapsed_s = (self._work.now - run.began_s) / run.factor
        batch = len(run.command.sequences)
        steps = steps_within(self._cost, batch, run.kv_tokens, elapsed_s) + 1
        if steps < run.steps:
            self._end_after(run, steps)

    def _end_after(self, run: _Run, steps: int) -> None:
        run.steps = steps
        seconds = run.step_s
        if steps > 1:
            seconds = repeat_s(self._cost, len(run.command.sequences), run.kv_tokens, steps)
        seconds *= run.factor
        self._work.at(run.began_s + seconds, self._ended, (run, steps, seconds))

    def _ended(self, what: tuple[_Run, int, float]) -> None:
        run, steps, seconds = what
        if run is not self._run or steps != run.steps:
            return
        self._run = None
        slower = run.factor
        if self._cores is not None:
            self._cores.end()
            took_s = self._timeline.now - run.started_s
            slower, seconds = slower * took_s / seconds if seconds > 0.0 else 1.0, took_s
        self.busy_s += seconds
        sequences = run.command.sequences
        if run.command.up_to > 1:
            sampled = [s.attempt for s in sequences]
        else:
            sampled = [s.attempt for s in sequences if s.sample is not None]
        self._ran(
            sampled, run.started_s, self._timeline.now, steps, run.step_s * slower, run.growth_s * slower
        )
        tokens = (TOKEN,) * steps
        if len(sampled) == len(sequences):
            results = [SequenceResult(attempt, tokens) for attempt in sampled]
        else:
            results = [SequenceResult(s.attempt, tokens if s.sample is not None else ()) for s in sequences]
        self._done(StepDone(run.command.step, tuple(results), steps, seconds))
