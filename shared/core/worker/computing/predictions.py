"""What a node's work will take, by a time model that is given or learned from the node's own measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.core.costs.model import (
    CostFit,
    Kind,
    compute_s,
    load_features,
    load_s,
    mixed_s,
    prefill_features,
    prefill_s,
    step_features,
    step_s,
)
from shared.core.kv.pool import BlockPool
from shared.core.worker.computing.prefix import expected_prefix
from shared.core.worker.config import WorkerConfig
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import StepDone
from shared.core.worker.transfers import FetchBlocks
from shared.protocol.cluster import LinkTotals
from shared.protocol.ids import AttemptId, NodeRef


@dataclass(slots=True, frozen=True)
class _Running:
    """Work that is out, and what it will have taken off the backlog when it ends."""

    began_s: float
    seconds: float
    worth_s: float

    def done_s(self, now: float) -> float:
        """The part that is done by now. Work that takes longer than predicted counts as nearly done, never as more."""
        if self.seconds <= 0.0 or now >= self.began_s + self.seconds:
            return self.worth_s
        return self.worth_s * max(0.0, now - self.began_s) / self.seconds


class Predictions:
    """The time model of one node, and the sum of all prefill time that its live sequences still need."""

    def __init__(self, worker: WorkerConfig, pool: BlockPool) -> None:
        self.cost = worker.cost
        self.learns = worker.fit_cost
        self.backlog_s = 0.0
        """Of the beginning of the work that is out."""
        self.fetched_near = self.fetched_far = LinkTotals()
        self._fit = CostFit(worker.cost)
        self._host = worker.host
        self._pool = pool
        self._block_tokens = worker.block_tokens
        self._chunk_tokens = worker.chunk_tokens
        self._step: _Running | None = None
        self._fetches: dict[AttemptId, _Running] = {}
        self._awaited: dict[AttemptId, float] = {}
        """When the blocks that a sequence waits for are predicted to be computed, of those that wait for any."""

    # -- expecting -------------------------------------------------------------------------------------------------

    def queue_s(
        self, live: Iterable[SequenceState], now: float, decoding: int = 0, kv_tokens: int = 0
    ) -> float:
        """Time until all prefills of live sequences are done, given oldest first: what they need without what running
        steps and fetches have done of it, and with what they have to wait for. `decoding`, `kv_tokens`: the batch that
        decodes beside, which every chunk has to carry along."""
        done_s = self._step.done_s(now) if self._step is not None else 0.0
        for fetch in self._fetches.values():
            done_s += fetch.done_s(now)
        seconds = self.backlog_s - done_s
        if self._awaited:
            seconds = -done_s
            for s in live:
                ready_s = self._awaited.get(s.attempt)
                if ready_s is not None and ready_s - now > seconds:
                    seconds = ready_s - now
                seconds += s.expected_s
        if seconds <= 0.0:
            return 0.0
        if decoding:
            beside_s = max(0.0, step_s(self.cost, decoding, kv_tokens) - self.cost.prefill_fixed_s)
            chunk_s = compute_s(self.cost, 0, self._chunk_tokens)
            seconds += beside_s * max(1.0, seconds / chunk_s) if chunk_s > 0.0 else beside_s
        return seconds

    def expect_prefill(self, sequence: SequenceState) -> None:
        """Predict afresh what the sequence's prefill will take from now on."""
        if sequence.pages:
            self._expect(sequence, self._compute_s(sequence.computed, sequence.prompt_tokens))
        else:
            cached = expected_prefix(self._pool, sequence, self._block_tokens)
            chunks_s = self._more_chunks_s(sequence.prompt_tokens - cached)
            seconds = prefill_s(self.cost, sequence.prompt_tokens, cached) + chunks_s
            self._expect(sequence, seconds + self._pull_extra_s(sequence, cached))

    def accepted(self, sequence: SequenceState, now: float) -> None:
        """The sequence came in. What it is to reuse may still be computed elsewhere."""
        wait_s = max([s.ready_in_s for s in sequence.sources], default=0.0)
        if wait_s > 0.0:
            self._awaited[sequence.attempt] = now + wait_s
        self.expect_prefill(sequence)

    def awaits(self, sequence: SequenceState) -> bool:
        """Whether it is to reuse blocks that are still being computed."""
        return sequence.attempt in self._awaited

    def gap_s(self, active: Iterable[SequenceState], now: float) -> float:
        """Seconds until the first of the active sequences gets blocks that it waits for; 0: none waits, or they are
        due."""
        awaited = [self._awaited[s.attempt] for s in active if s.attempt in self._awaited]
        return max(0.0, min(awaited, default=now) - now)

    def fetch_begun(self, sequence: SequenceState, fetch: FetchBlocks, now: float) -> None:
        """The sequence waits for these blocks; it will compute what is behind them. The time until they can be pulled is
        no work: others use it."""
        have = (fetch.source.first_block + fetch.source.blocks) * self._block_tokens
        seconds = self._load_s(have - sequence.computed, near=self.is_near(fetch.source.holder))
        if fetch.source.ready_in_s > 0.0:
            self._awaited[sequence.attempt] = now + fetch.source.ready_in_s
        self._fetches[sequence.attempt] = _Running(now + fetch.source.ready_in_s, seconds, seconds)
        self._expect(sequence, seconds + self._compute_s(have, sequence.prompt_tokens))

    def fetch_ended(self, sequence: SequenceState) -> None:
        self._fetches.pop(sequence.attempt, None)
        self._awaited.pop(sequence.attempt, None)
        self.expect_prefill(sequence)

    def step_begun(self, plan: Sequence[tuple[SequenceState, int]], now: float) -> None:
        """This step is out. Its sequences are as they were before."""
        chunks = [(s, n) for s, n in plan if not s.decoding]
        if not chunks:
            self._step = None
            return
        decoding = [s.computed for s, _ in plan if s.decoding]
        worth_s = 0.0
        for s, n in chunks:
            if s.began_s < 0.0:
                s.began_s = now
            left_s = self._compute_s(s.computed + n, s.prompt_tokens)
            worth_s += max(0.0, s.expected_s - left_s)
        seconds = mixed_s(self.cost, [(s.computed, n) for s, n in chunks], len(decoding), sum(decoding))
        self._step = _Running(now, seconds, worth_s)

    def step_ended(self) -> None:
        self._step = None

    def forget(self, sequence: SequenceState, *, last: bool) -> None:
        """The sequence has ended. `last`: no other is live, so that rounding errors end with it."""
        self._fetches.pop(sequence.attempt, None)
        self._awaited.pop(sequence.attempt, None)
        self._expect(sequence, 0.0)
        if last:
            self.backlog_s = 0.0

    def _compute_s(self, start: int, end: int) -> float:
        """Computing these positions, in as many chunks as that takes."""
        if end <= start:
            return 0.0
        return compute_s(self.cost, start, end - start) + self._more_chunks_s(end - start)

    def _pull_extra_s(self, sequence: SequenceState, cached: int) -> float:
        """By how much longer it takes to fetch what comes from other hosts than if it came from the own one."""
        far = 0
        for source in sequence.sources:
            if not self.is_near(source.holder):
                end = min(cached, (source.first_block + source.blocks) * self._block_tokens)
                far += max(0, end - source.first_block * self._block_tokens)
        return (self._fit.pull_token_s - self.cost.load_token_s) * far

    def _load_s(self, tokens: int, *, near: bool) -> float:
        """Fetching their KV."""
        return load_s(self.cost, tokens) if near else self._fit.pull_token_s * tokens

    def _more_chunks_s(self, tokens: int) -> float:
        """What chunks after the first one cost, whatever their size."""
        return self.cost.prefill_fixed_s * ((tokens - 1) // self._chunk_tokens) if tokens > 0 else 0.0

    def _expect(self, sequence: SequenceState, seconds: float) -> None:
        self.backlog_s += seconds - sequence.expected_s
        sequence.expected_s = seconds

    # -- learning --------------------------------------------------------------------------------------------------

    def is_near(self, holder: NodeRef) -> bool:
        """Whether it is on the same host."""
        return bool(holder.host) and holder.host == self._host

    def learn_fetch(self, blocks: int, seconds: float, *, near: bool) -> None:
        """So many blocks were fetched in that time. The model takes it in with the next step."""
        if not self.learns:
            return
        self._fit.observe("load" if near else "pull", load_features(blocks * self._block_tokens), seconds)
        before = self.fetched_near if near else self.fetched_far
        totals = LinkTotals(before.fetches + 1, before.blocks + blocks, before.seconds + seconds)
        if near:
            self.fetched_near = totals
        else:
            self.fetched_far = totals

    def learn_step(self, plan: Sequence[tuple[SequenceState, int]], event: StepDone) -> None:
        """From the step that is out, whose sequences are as they were when it began."""
        chunks = [(s.computed, n) for s, n in plan if not s.decoding]
        if len(chunks) == len(plan):
            self._fit.observe("prefill", prefill_features(chunks), event.seconds)
        elif not chunks:
            kv_tokens = sum(s.computed for s, _ in plan)
            self._fit.observe("step", step_features(len(plan), kv_tokens), event.seconds / event.steps)
        else:
            decoding = [s.computed for s, _ in plan if s.decoding]
            self._fit.observe_mixed(chunks, len(decoding), sum(decoding), event.seconds)
        self.cost = self._fit.coefficients

    def samples(self, kind: Kind) -> int:
        return self._fit.samples(kind)

    def check(self, live: Sequence[SequenceState]) -> None:
        expected = sum(s.expected_s for s in live)
        assert abs(expected - self.backlog_s) < 1e-6 + 1e-9 * expected, (
            f"backlog {self.backlog_s}, sum {expected}"
        )
        assert self._awaited.keys() <= {s.attempt for s in live}, "who has ended waits for blocks"
        assert self._fetches.keys() <= {s.attempt for s in live if s.fetching >= 0}, (
            "a fetch is awaited that is not out"
        )
