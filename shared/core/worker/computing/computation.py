"""Sequences on pages close their gaps: a prefix is fetched, the rest is computed in batched steps, tokens are sampled."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from shared.core.kv.pool import BlockPool
from shared.core.worker.attempts import AttemptTable
from shared.core.worker.computing.batching import plan_step
from shared.core.worker.computing.inflight_step import InflightStep
from shared.core.worker.computing.joining import Joining
from shared.core.worker.computing.predictions import Predictions
from shared.core.worker.computing.prefix import key_blocks, match_more, next_fetch
from shared.core.worker.config import WorkerConfig
from shared.core.worker.outbox import Outbox
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import SequenceResult, StepDone, StepFailed
from shared.core.worker.transfers import BlocksFetched
from shared.protocol.requests import TokenDelta

S = TypeVar("S", bound=SequenceState)
S_contra = TypeVar("S_contra", bound=SequenceState, contravariant=True)


class Listener(Protocol[S_contra]):
    """The machine that has the computation."""

    def sampled(self, sequence: S_contra, delta: TokenDelta, now: float) -> None:
        """A sequence got tokens (already sent); `delta.finish` says whether it is complete."""


class Computation(Generic[S]):
    """The active sequences of one machine between their pages and their tokens. At most one step is out."""

    def __init__(
        self,
        worker: WorkerConfig,
        pool: BlockPool,
        out: Outbox,
        table: AttemptTable[S],
        predictions: Predictions,
        listener: Listener[S],
    ) -> None:
        self.inflight: InflightStep[S] = InflightStep()
        self.changed = False
        """Since somebody looked last, a sequence became ready, or one in the step that is out has ended."""
        self._joining: Joining[S] = Joining(worker.block_tokens)
        self._worker = worker
        self._pool = pool
        self._out = out
        self._table = table
        self._predictions = predictions
        self._listener = listener
        self._counters = table.counters

    def retired(self, sequence: S) -> None:
        """The sequence has ended: nothing more of it is computed."""
        self.changed |= sequence.in_step
        self._predictions.forget(sequence, last=not self._table.live)
        if self._pool.keeps:
            self._joining.retired(sequence)

    # -- the prefix ------------------------------------------------------------------------------------------------

    def begin(self, sequence: S, now: float) -> None:
        """The sequence has its pages now: fetch what others have of its prefix."""
        self._table.activate(sequence)
        self._predictions.expect_prefill(sequence)
        self._fetch_more(sequence, now)

    def fetched(self, event: BlocksFetched, now: float) -> None:
        table, block_tokens = self._table, self._worker.block_tokens
        sequence = table.known.get(event.attempt)
        if sequence is None or sequence.fetching < 0 or sequence.fetches != event.turn:
            table.late()
            return
        sequence.fetching = -1
        if sequence.ended:
            table.free_if_quiet(sequence)
            return
        tokens = event.blocks * block_tokens
        sequence.computed += tokens
        self._counters["fetched_tokens"] += tokens
        if event.error:
            self._counters["fetches_failed"] += 1
        elif tokens and not self._predictions.awaits(sequence):  # a wait is no load
            self._time_fetch(sequence, event)
        key_blocks(self._pool, sequence, block_tokens)
        self._predictions.fetch_ended(sequence)
        self._fetch_more(sequence, now)

    def _time_fetch(self, sequence: S, event: BlocksFetched) -> None:
        near = self._predictions.is_near(sequence.sources[sequence.sources_tried - 1].holder)
        if near:
            sequence.loaded_s += event.seconds
        else:
            sequence.pulled_s += event.seconds
        self._predictions.learn_fetch(event.blocks, event.seconds, near=near)

    def _fetch_more(self, sequence: S, now: float) -> None:
        """Ask the next source; with none left the sequence is ready to be computed."""
        fetch = next_fetch(sequence, self._worker.namespace, self._worker.block_tokens, now)
        if fetch is None:
            sequence.fetching = -1
            self.changed = True
            return
        sequence.fetching = fetch.source.first_block
        self._predictions.fetch_begun(sequence, fetch, now)
        self._out.commands.append(fetch)

    # -- planning a step -------------------------------------------------------------------------------------------

    def ready(self) -> list[S]:
        """Those whose prefix is there. What neighbours have computed by now is reused; who can reuse what a neighbour is
        computing waits for that, and keeps nobody else from a place in the step."""
        there = [s for s in self._table.active.values() if s.fetching < 0]
        if self.inflight.suspecting:
            return self.inflight.next_suspect_first(there)
        if not self._pool.keeps:
            return there
        return [s for s in there if s.answer.cached_tokens is not None or not self._waits(s)]

    def _waits(self, sequence: S) -> bool:
        if match_more(self._pool, sequence, self._worker.block_tokens):
            self._predictions.expect_prefill(sequence)
        return self._joining.waits(sequence)

    def plan(self, rows: list[S]) -> tuple[list[tuple[S, int]], list[S]]:
        """What the next step computes of ready sequences, and those of them whose first chunk that is: what is in memory
        by now is what they reused. Empty when none may run."""
        rows = self.inflight.suspects_first(rows)
        if not rows:
            return [], []
        worker = self._worker
        prompts = [s for s in rows if s.computed < s.prompt_tokens]
        plan = plan_step(
            rows,
            chunk_tokens=worker.chunk_tokens,
            block_tokens=worker.block_tokens,
            max_rows=worker.max_running,
        )
        if not prompts:
            return plan, []
        begun = [s for s, _ in plan if not s.decoding and s.answer.cached_tokens is None]
        for sequence in begun:
            sequence.answer.cached_tokens = sequence.computed
            self._counters["cached_tokens"] += sequence.computed
        return plan, begun

    def launch(self, plan: list[tuple[S, int]], now: float, up_to: int = 1) -> None:
        """Run the planned step."""
        self._predictions.step_begun(plan, now)
        self._out.commands.append(self.inflight.launch(plan, up_to))

    def check(self) -> None:
        self._joining.check(self._table.live)

    # -- the end of a step -----------------------------------------------------------------------------------------

    def step_done(self, event: StepDone, now: float) -> None:
        inflight, generated = self.inflight, 0
        if inflight.out is None or event.step != inflight.step:
            self._table.late()
            return
        self._predictions.step_ended()
        if self._predictions.learns:
            self._predictions.learn_step(inflight.out, event)
        if inflight.decodes and not self._worker.stream_tokens:
            generated, results = inflight.done_holding(event)
        else:
            results = inflight.done(event)
        self._counters["steps"] += event.steps
        for sequence, tokens, result in results:
            decoding = sequence.computed >= sequence.prompt_tokens
            if decoding and not (result.error or sequence.ended or sequence.void):  # nearly always
                generated += self._take(sequence, result, now)
            else:
                generated += self._look_at(sequence, tokens, result, now)
        self._counters["tokens_generated"] += generated
        self._table.tokens += generated

    def step_failed(self, event: StepFailed, now: float) -> None:
        plan = self.inflight.out
        guilty = self.inflight.failed(event.step)
        if guilty is None or plan is None:
            self._table.late()
            return
        self._counters["steps_failed"] += 1
        self._predictions.step_ended()
        for sequence, _ in plan:
            sequence.void = True
            if sequence.ended:
                self._table.close(sequence, now)
        for sequence in guilty:
            if not sequence.ended:
                self._table.end(sequence, now, "failed", event.error)

    def _look_at(self, sequence: S, tokens: int, result: SequenceResult, now: float) -> int:
        """A chunk of a prompt, an error, or the result of a sequence that has ended. Returns as `_take`."""
        prompt = sequence.computed < sequence.prompt_tokens
        sequence.void = bool(result.error)
        if prompt and not result.error:
            sequence.computed += tokens
            self._counters["prompt_tokens_computed"] += tokens
            key_blocks(self._pool, sequence, self._worker.block_tokens)
        if sequence.ended:
            self._table.close(sequence, now)
            return 0
        if prompt:
            self._predictions.expect_prefill(sequence)
        if result.error:
            self._table.end(sequence, now, "failed", result.error)
        elif sequence.decoding:
            sequence.answer.stages = sequence.stages(now)
            return self._take(sequence, result, now)
        return 0

    def _take(self, sequence: S, result: SequenceResult, now: float) -> int:
        """The sequence's known tokens were all computed: it has sampled. Returns how many it has more."""
        before = sequence.wanted
        delta = sequence.take(result.tokens, result.logprobs)
        if delta is None:
            self._table.end(sequence, now, "failed", "the engine sampled no token")
            return 0
        sequence.computed = sequence.wanted - 1
        grown = sequence.wanted - before
        self._out.send(sequence.gateway, delta)
        self._listener.sampled(sequence, delta, now)
        return grown
