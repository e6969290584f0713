"""What a node's work will take, by a time model that is given or learned from the node's own measurements."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.costs.model import (
    CostFit,
    Kind,
    compute_s,
    load_features,
    prefill_features,
    prefill_s,
    step_features,
)
from shared.core.kv.pool import BlockPool
from shared.core.worker.computing.prefix import expected_prefix
from shared.core.worker.config import WorkerConfig
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import StepDone


class Predictions:
    """The time model of one node, and the sum of all prefill time that its live sequences still need."""

    def __init__(self, worker: WorkerConfig, pool: BlockPool) -> None:
        self.cost = worker.cost
        self.learns = worker.fit_cost
        self.backlog_s = 0.0
        self._fit = CostFit(worker.cost)
        self._pool = pool
        self._block_tokens = worker.block_tokens

    # -- expecting -------------------------------------------------------------------------------------------------

    def expect_prefill(self, sequence: SequenceState) -> None:
        """Predict afresh what the sequence's prefill will take from now on."""
        if sequence.pages:
            left = sequence.prompt_tokens - sequence.computed
            seconds = compute_s(self.cost, sequence.computed, left) if left > 0 else 0.0
        else:
            cached = expected_prefix(self._pool, sequence, self._block_tokens)
            seconds = prefill_s(self.cost, sequence.prompt_tokens, cached)
        self._expect(sequence, seconds)

    def forget(self, sequence: SequenceState, *, last: bool) -> None:
        """The sequence has ended. `last`: no other is live, so that rounding errors end with it."""
        self._expect(sequence, 0.0)
        if last:
            self.backlog_s = 0.0

    def _expect(self, sequence: SequenceState, seconds: float) -> None:
        self.backlog_s += seconds - sequence.expected_s
        sequence.expected_s = seconds

    # -- learning --------------------------------------------------------------------------------------------------

    def learn_fetch(self, tokens: int, seconds: float) -> None:
        """So many tokens' KV was fetched in that time. The model takes it in with the next step."""
        if self.learns:
            self._fit.observe("load", load_features(tokens), seconds)

    def learn_step(self, plan: Sequence[tuple[SequenceState, int]], event: StepDone) -> None:
        """From the step that is out, whose sequences are as they were when it began."""
        chunks = [(s.computed, n) for s, n in plan if not s.decoding]
        if len(chunks) == len(plan):
            self._fit.observe("prefill", prefill_features(chunks), event.seconds)
        elif not chunks:
            kv_tokens = sum(s.computed for s, _ in plan)
            self._fit.observe("step", step_features(len(plan), kv_tokens), event.seconds / event.steps)
        self.cost = self._fit.coefficients

    def samples(self, kind: Kind) -> int:
        return self._fit.samples(kind)

    def check(self, live: Sequence[SequenceState]) -> None:
        expected = sum(s.expected_s for s in live)
        assert abs(expected - self.backlog_s) < 1e-6 + 1e-9 * expected, (
            f"backlog {self.backlog_s}, sum {expected}"
        )
