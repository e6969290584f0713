"""What prefill and decode machines have in common: sequences on pages that close their gaps in batched steps.

Subclasses say who comes in, which sequences may run next, and what a sampled token and an end mean.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from shared.core.costs.model import (
    CostFit,
    Kind,
    compute_s,
    load_features,
    prefill_features,
    prefill_s,
    step_features,
)
from shared.core.worker.attempts import AttemptTable
from shared.core.worker.batching import plan_step
from shared.core.worker.config import WorkerConfig
from shared.core.worker.inflight_step import InflightStep
from shared.core.worker.prefix import expected_prefix, key_blocks, match_more, next_fetch
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import RunStep, SequenceResult, StepDone, StepFailed
from shared.core.worker.transfers import BlocksFetched
from shared.protocol.cluster import NodeLoad, Stage
from shared.protocol.ids import AttemptId, Role
from shared.protocol.requests import TokenDelta

S = TypeVar("S", bound=SequenceState)


class WorkerMachine(AttemptTable[S]):
    """One worker's state. `handle` alone mutates it; `load` may be asked at any time."""

    role: ClassVar[Role]
    cost_kind: ClassVar[Kind]
    """Which of its measurements the node's time model stands on."""

    def __init__(self, worker: WorkerConfig) -> None:
        super().__init__(worker)
        self.cost = worker.cost
        self._fit = CostFit(worker.cost)
        self._active: dict[AttemptId, S] = {}
        """Live ones that have pages and something to compute, in the order they came."""
        self._inflight: InflightStep[S] = InflightStep()
        self._backlog_s = 0.0
        self._handlers |= {
            StepDone: self._on_step_done,
            StepFailed: self._on_step_failed,
            BlocksFetched: self._on_fetched,
        }

    # -- predictions -----------------------------------------------------------------------------------------------

    def _expect_prefill(self, sequence: S) -> None:
        """Predict afresh what the sequence's prefill will take from now on."""
        if sequence.pages:
            left = sequence.prompt_tokens - sequence.computed
            seconds = compute_s(self.cost, sequence.computed, left) if left > 0 else 0.0
        else:
            cached = expected_prefix(self.pool, sequence, self.worker.block_tokens)
            seconds = prefill_s(self.cost, sequence.prompt_tokens, cached)
        self._expect(sequence, seconds)

    def _expect(self, sequence: S, seconds: float) -> None:
        self._backlog_s += seconds - sequence.expected_s
        sequence.expected_s = seconds
        if not self._live:
            self._backlog_s = 0.0

    def _begun(self, sequence: S) -> bool:
        return bool(sequence.answer.tokens) or sequence.attempt in self._active

    def _retire(self, sequence: S, now: float) -> None:
        self._active.pop(sequence.attempt, None)
        super()._retire(sequence, now)
        self._expect(sequence, 0.0)

    # -- the prefix ------------------------------------------------------------------------------------------------

    def _fetch_more(self, sequence: S) -> None:
        """Ask the next source; with none left the sequence is ready to be computed."""
        fetch = next_fetch(sequence, self.worker.namespace, self.worker.block_tokens)
        if fetch is None:
            sequence.fetching = -1
            return
        sequence.fetching = fetch.source.first_block
        self._commands.append(fetch)

    def _on_fetched(self, event: BlocksFetched, now: float) -> None:
        sequence = self._known.get(event.attempt)
        if sequence is None or sequence.fetching < 0 or sequence.fetches != event.turn:
            self._late()
            return
        sequence.fetching = -1
        if sequence.ended:
            self._free_if_quiet(sequence)
            return
        block_tokens = self.worker.block_tokens
        sequence.computed += event.blocks * block_tokens
        self.counters["fetched_tokens"] += event.blocks * block_tokens
        if event.error:
            self.counters["fetches_failed"] += 1
        elif self.worker.fit_cost and event.blocks:
            self._fit.observe("load", load_features(event.blocks * block_tokens), event.seconds)
        key_blocks(self.pool, sequence, block_tokens)
        self._expect_prefill(sequence)
        self._fetch_more(sequence)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if self._inflight.out is not None or not self._active:
            return
        ready = [s for s in self._active.values() if s.fetching < 0]
        if not ready:
            return
        rows = self._inflight.suspects_first(self._runnable(ready, now))
        if not rows:
            return
        config = self.worker
        prompts = [s for s in rows if s.computed < s.prompt_tokens]
        for sequence in prompts:
            if not self._started(sequence):
                match_more(self.pool, sequence, config.block_tokens)
        plan = plan_step(
            rows,
            chunk_tokens=config.chunk_tokens,
            block_tokens=config.block_tokens,
            max_rows=config.max_running,
        )
        if prompts:
            for sequence, _ in plan:
                if not sequence.decoding and not self._started(sequence):
                    self._start(sequence)
        self._commands.append(self._launch(plan))

    def _launch(self, plan: list[tuple[S, int]]) -> RunStep:
        return self._inflight.launch(plan)

    def _started(self, sequence: S) -> bool:
        return sequence.answer.cached_tokens is not None

    def _start(self, sequence: S) -> None:
        """The first chunk is about to run: what is in memory by now is what was reused."""
        sequence.answer.cached_tokens = sequence.computed
        self.counters["cached_tokens"] += sequence.computed

    def _on_step_done(self, event: StepDone, now: float) -> None:
        inflight, generated = self._inflight, 0
        if inflight.out is None or event.step != inflight.step:
            self._late()
            return
        if self.worker.fit_cost:
            self._learn(inflight.out, event)
        if inflight.decodes and not self.worker.stream_tokens:
            generated, results = inflight.done_holding(event)
        else:
            results = inflight.done(event)
        self.counters["steps"] += event.steps
        for sequence, tokens, result in results:
            decoding = sequence.computed >= sequence.prompt_tokens
            if decoding and not (result.error or sequence.ended or sequence.void):  # nearly always
                generated += self._take(sequence, result, now)
                continue
            sequence.void = bool(result.error)
            prompt = not decoding
            if prompt and not result.error:
                sequence.computed += tokens
                self.counters["prompt_tokens_computed"] += tokens
                key_blocks(self.pool, sequence, self.worker.block_tokens)
            if sequence.ended:
                self._close(sequence, now)
                continue
            if prompt:
                self._expect_prefill(sequence)
            if result.error:
                self._end(sequence, now, "failed", result.error)
            elif sequence.decoding:
                generated += self._take(sequence, result, now)
        self.counters["tokens_generated"] += generated
        self._grew(generated)

    def _take(self, sequence: S, result: SequenceResult, now: float) -> int:
        """The sequence's known tokens were all computed: it has sampled. Returns how many it has more."""
        before = sequence.wanted
        delta = sequence.take(result.tokens, result.logprobs)
        if delta is None:
            self._end(sequence, now, "failed", "the engine sampled no token")
            return 0
        sequence.computed = sequence.wanted - 1
        grown = sequence.wanted - before
        self._send(sequence.gateway, delta)
        self._sampled(sequence, delta, now)
        return grown

    def _on_step_failed(self, event: StepFailed, now: float) -> None:
        plan = self._inflight.out
        guilty = self._inflight.failed(event.step)
        if guilty is None or plan is None:
            self._late()
            return
        self.counters["steps_failed"] += 1
        for sequence, _ in plan:
            sequence.void = True
            if sequence.ended:
                self._close(sequence, now)
        for sequence in guilty:
            if not sequence.ended:
                self._end(sequence, now, "failed", event.error)

    def _learn(self, plan: list[tuple[S, int]], event: StepDone) -> None:
        """From the step that is out, whose sequences are as they were when it began."""
        chunks = [(s.computed, n) for s, n in plan if not s.decoding]
        if len(chunks) == len(plan):
            self._fit.observe("prefill", prefill_features(chunks), event.seconds)
        elif not chunks:
            kv_tokens = sum(s.computed for s, _ in plan)
            self._fit.observe("step", step_features(len(plan), kv_tokens), event.seconds / event.steps)
        self.cost = self._fit.coefficients

    # -- outside views ---------------------------------------------------------------------------------------------

    def load(self, now: float, seq: int = 0, stage: Stage = "ready", *, totals: bool = True) -> NodeLoad:
        """How busy the node is: its heartbeat. `totals` off: without the counters, which nobody plans by."""
        running, waiting, batch_tokens = self._tally()
        pool, fits = self.pool, self.worker.fit_cost
        return NodeLoad(
            node=self.worker.node,
            incarnation=self.worker.incarnation,
            role=self.role,
            seq=seq,
            stage="draining" if self._drain_deadline is not None else stage,
            running=running,
            waiting=waiting,
            kv_blocks=pool.total,
            kv_blocks_held=pool.held,
            kv_blocks_cached=pool.cached,
            queue_s=self._backlog_s if self._backlog_s > 0.0 else 0.0,
            batch_tokens=batch_tokens,
            attempts=self.attempts(),
            counters=self.counters.copy() if totals else {},
            block_events_seq=self._blocks_seq,
            cost=self.cost if fits else None,
            cost_samples=self._fit.samples(self.cost_kind) if fits else 0,
            cost_given=not fits,
        )

    def check(self) -> None:
        super().check()
        in_step = {s.attempt for s, _ in self._inflight.out or ()}
        for attempt, s in self._known.items():
            assert s.in_step == (attempt in in_step), f"{attempt}: in_step is {s.in_step}"
        assert in_step <= set(self._known), "a sequence in a step was forgotten"
        assert set(self._active) <= set(self._live)
        expected = sum(s.expected_s for s in self._live.values())
        assert abs(expected - self._backlog_s) < 1e-6 + 1e-9 * expected, (
            f"backlog {self._backlog_s}, sum {expected}"
        )

    # -- hooks -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _runnable(self, ready: list[S], now: float) -> list[S]:
        """Of the sequences with something to compute, those that may be in the next step, in order."""

    def _grew(self, tokens: int) -> None:
        """The sequences of a step have so many tokens more, together."""

    @abstractmethod
    def _sampled(self, sequence: S, delta: TokenDelta, now: float) -> None:
        """A sequence got tokens (already sent); `delta.finish` says whether it is complete."""

    @abstractmethod
    def _tally(self) -> tuple[int, int, int]:
        """(running, waiting, KV tokens of the batch)."""
