"""The one engine step that may be out: from a plan to RunStep, and from its ending back to the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from shared.core.kv.block_keys import TOKEN_BYTES
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import InterruptRun, RunStep, SequenceResult, SequenceStep, StepDone

S = TypeVar("S", bound=SequenceState)
Row = tuple[S, int, SequenceResult]
"""A sequence that was in a step, how many of its tokens were computed, and what came of it."""


class InflightStep(Generic[S]):
    """At most one step is out. Sequences in it are marked, so that nobody frees their pages meanwhile.

    When a step fails as a whole, somebody in it may be the cause: each of its sequences is run again alone, and one
    that fails then is the cause.
    """

    def __init__(self) -> None:
        self.step = 0
        self.out: list[tuple[S, int]] | None = None
        """The plan of the step that is out: sequence, tokens computed."""
        self.decodes = False
        """The last step launched was one of a batch that only decodes."""
        self._up_to = 1
        self._interrupted = False
        self._suspects: deque[S] = deque()
        self._retried: S | None = None
        """The suspect that was chosen to run alone."""

    def launch(self, plan: list[tuple[S, int]], up_to: int = 1) -> RunStep:
        assert self.out is None, "a step is out"
        self.step += 1
        self.out, self.decodes, self._up_to, self._interrupted = plan, False, up_to, False
        rows = []
        for sequence, tokens in plan:
            sequence.in_step = True
            rows.append(sequence_step(sequence, tokens))
        return RunStep(self.step, tuple(rows), up_to)

    def launch_decoding(self, sequences: Iterable[S], block_tokens: int, up_to: int) -> RunStep | None:
        """`launch` for those whose prefix is there, all in one pass, repeated until one of them is complete or has no
        page. None, and no change, if one is not decoding, has no page now, or there is none."""
        plan: list[tuple[S, int]] = []
        rows: list[SequenceStep] = []
        for s in sequences:
            left = s.until - s.wanted
            if left <= 0:  # it is new, or its pages were full
                if s.fetching >= 0:
                    continue
                left = s.steps_left(block_tokens)
                if left <= 0:
                    return None
            if left < up_to:
                up_to = left
            plan.append((s, 1))
            if s.looks_back:
                rows.append(sequence_step(s, 1))
                continue
            last = (s.unwritten[-1] if s.unwritten else s.answer.tokens)[-1].to_bytes(TOKEN_BYTES, "little")
            rows.append(SequenceStep(s.attempt, s.computed, 1, last, s.page_table, s.sampling))
        if not plan:
            return None
        for s, _ in plan:
            s.in_step = True
        self.step += 1
        self.out, self.decodes, self._retried = plan, True, None
        self._up_to, self._interrupted = up_to, False
        return RunStep(self.step, tuple(rows), up_to)

    def interrupt(self) -> InterruptRun | None:
        """Ask a repeating step to end soon; None if there is none or it was asked."""
        if self.out is None or self._up_to == 1 or self._interrupted:
            return None
        self._interrupted = True
        return InterruptRun(self.step)

    def done(self, event: StepDone) -> list[Row[S]]:
        """Of the step that is out: the plan with its results. A sequence without a result gets an error."""
        plan = self._take_back()
        return [(s, computed, _result_of(s, place, event)) for place, (s, computed) in enumerate(plan)]

    def done_holding(self, event: StepDone) -> tuple[int, list[Row[S]]]:
        """`done`, but tokens that are neither the first nor the last of an answer are appended to it and held back in the
        same pass. How many those were comes first, then the rows that are left to look at."""
        plan = self.out
        assert plan is not None, "no step is out"
        self.out, held, rest = None, 0, []
        results: Iterable[SequenceResult] = event.results
        if len(event.results) != len(plan):
            results = [_result_of(s, place, event) for place, (s, _) in enumerate(plan)]
        for (s, computed), result in zip(plan, results, strict=True):
            s.in_step = False
            if result.attempt != s.attempt:
                result = _result_of(s, 0, event)
            tokens, before = result.tokens, s.wanted
            wanted = before + len(tokens)
            inside = s.prompt_tokens < before < wanted < s.holds_below
            if not inside or result.error or s.ended or s.void:
                rest.append((s, computed, result))
                continue
            if s.unsent < 0:
                s.unsent = len(s.answer.tokens)
            s.unwritten.append(tokens)
            s.wanted, s.computed = wanted, wanted - 1
            held += wanted - before
        return held, rest

    def failed(self, step: int) -> list[S] | None:
        """The sequences of the failed step that are known to be the cause; None for a step that is not out."""
        if self.out is None or step != self.step:
            return None
        plan = self._take_back()
        if len(plan) == 1 and plan[0][0] is self._retried:
            return [plan[0][0]]
        self._suspects.extend(s for s, _ in plan)
        return []

    @property
    def suspecting(self) -> bool:
        """Whether some sequence has yet to run alone."""
        return bool(self._suspects)

    def next_suspect_first(self, rows: list[S]) -> list[S]:
        """The same sequences, the suspect whose turn it is in front: it gets a place in the step, whoever came before."""
        for suspect in self._suspects:
            if not suspect.ended:
                return sorted(rows, key=lambda s: s is not suspect)
        return rows

    def suspects_first(self, rows: list[S]) -> list[S]:
        """Of the sequences that could run, those that may run together: one suspect alone, while there are any."""
        self._retried = None
        if not self._suspects:
            return rows
        while self._suspects:
            if self._suspects[0].ended:
                self._suspects.popleft()
                continue
            if any(s is self._suspects[0] for s in rows):
                self._retried = self._suspects.popleft()
                return [self._retried]
            break  # it waits for something else; the others need not
        return [s for s in rows if s not in self._suspects]

    def _take_back(self) -> list[tuple[S, int]]:
        plan, self.out = self.out, None
        assert plan is not None, "no step is out"
        for sequence, _ in plan:
            sequence.in_step = False
        return plan


def sequence_step(sequence: SequenceState, tokens: int) -> SequenceStep:
    """The next `tokens` of a sequence; the last known token's step also samples."""
    start, pages = sequence.computed, sequence.page_table
    if len(pages) != len(sequence.pages):
        pages = sequence.table()
    sample = sequence.sampling if start + tokens == sequence.wanted else None
    if start >= sequence.prompt_tokens:
        if sequence.unwritten:
            sequence.flush()
        ids = sequence.answer.tokens[-1].to_bytes(TOKEN_BYTES, "little")
    else:
        ids = sequence.tokens[start * TOKEN_BYTES : (start + tokens) * TOKEN_BYTES]
    if sequence.looks_back and sample is not None:
        return SequenceStep(sequence.attempt, start, tokens, ids, pages, sample, *sequence.past())
    return SequenceStep(sequence.attempt, start, tokens, ids, pages, sample)


def _result_of(sequence: SequenceState, place: int, event: StepDone) -> SequenceResult:
    """Mostly at the place that the sequence has in the plan."""
    attempt, results = sequence.attempt, event.results
    if place < len(results) and results[place].attempt == attempt:
        return results[place]
    by_attempt = {result.attempt: result for result in results}
    return by_attempt.get(attempt) or SequenceResult(attempt, error="the engine gave no result")
