"""The prefill role: prompts in, first tokens out, KV streamed on while it is computed.

    submitted -> waiting (for a place and pages) -> prefix fetched -> chunks computed, streaming -> first token
                                                                   -> handed over -> pages free

Jobs are taken first come, first served. A job is live until its KV is handed over (or it ended before); its blocks stay
cached in the node's own memory until their pages are needed.
"""

from __future__ import annotations

from shared.core.kv.block_keys import TOKEN_BYTES, blocks_for
from shared.core.worker import events as w
from shared.core.worker.answers import Answer
from shared.core.worker.config import PrefillConfig
from shared.core.worker.machine import WorkerMachine
from shared.core.worker.prefix import take_pages
from shared.core.worker.sequence import SequenceState
from shared.core.worker.transfers import (
    AbortStreams,
    CommitHandoff,
    CommitPoolWrite,
    HandoffEnded,
    OpenHandoff,
    OpenPoolWrite,
    SendBlocks,
)
from shared.core.worker.validation import bad_tokens, misfit, never_fits, overloaded
from shared.protocol.ids import AttemptId
from shared.protocol.requests import Accepted, HandoffTarget, PrefillJob, TokenDelta


class PrefillSequence(SequenceState):
    target: HandoffTarget | None = None
    """None: only the first token is wanted."""
    deadline: float = 0.0
    """By when it must have started; 0: any time."""
    handoff_open: bool = False
    handoff_closing: bool = False
    """Committed or aborted: only its ending is awaited."""
    handoff_committed: bool = False

    @property
    def quiet(self) -> bool:
        return not (self.in_step or self.pool_open or self.handoff_open or self.fetching >= 0)


class PrefillMachine(WorkerMachine[PrefillSequence]):
    """See core.machine.Machine. Each accepted attempt gets exactly one ending: a delta with its finish, a hand-over
    (its first token was sent, the decode node goes on), or silence when its owner cancelled it or is gone."""

    role = "prefill"
    cost_kind = "prefill"

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config)
        self.config = config
        self._waiting: dict[AttemptId, PrefillSequence] = {}
        self._blocked: tuple[AttemptId, int] | None = None
        """The head of the queue that found too few pages, and how many there were."""
        self._handlers |= {w.JobSubmitted: self._on_submitted, HandoffEnded: self._on_handoff_ended}

    # -- coming in -------------------------------------------------------------------------------------------------

    def _on_submitted(self, event: w.JobSubmitted, now: float) -> None:
        job = event.job
        past = self._ended_answers.get(job.attempt)
        if job.attempt in self._known or (past is not None and past.started):
            self._commands.append(w.Reply(event.ask, Accepted(job.attempt)))
            return
        prompt_tokens = job.prompt_tokens or len(job.tokens) // TOKEN_BYTES
        config = self.worker
        error = (
            misfit(config, job, prompt_tokens)
            or bad_tokens(config, job.tokens, prompt_tokens)
            or never_fits(config, prompt_tokens)
            or (overloaded("the prefill queue is full", self._place_in_s()) if self._full() else None)
            or self._admit_owner(job, now)
        )
        if error is not None:
            self._refuse(event.ask, job, error)
            return
        sequence = new_sequence(job, prompt_tokens, now)
        self._accept(sequence)
        self._waiting[job.attempt] = sequence
        self._expect_prefill(sequence)
        if sequence.deadline:
            self._set_timer(sequence.deadline, sequence.attempt)
        self._commands.append(w.Reply(event.ask, Accepted(job.attempt)))

    def _full(self) -> bool:
        return len(self._waiting) >= self.worker.max_waiting

    def _place_in_s(self) -> float:
        """When the queue will be one shorter."""
        return self._backlog_s / max(1, len(self._live))

    def _advance(self, now: float) -> None:
        while self._waiting and len(self._active) < self.worker.max_running:
            sequence = next(iter(self._waiting.values()))
            if sequence.deadline and now >= sequence.deadline:
                self._end(sequence, now, "failed", "deadline_exceeded")
                continue
            if self._blocked == (sequence.attempt, self.pool.available):
                break
            blocks = blocks_for(sequence.prompt_tokens, self.worker.block_tokens)
            if not take_pages(self.pool, sequence, blocks, self.worker.block_tokens):
                self._blocked = (sequence.attempt, self.pool.available)
                break
            del self._waiting[sequence.attempt]
            self._active[sequence.attempt] = sequence
            self._expect_prefill(sequence)
            self._fetch_more(sequence)
        if self._active and self._inflight.out is None:
            super()._advance(now)

    def _timer_fired(self, sequence: PrefillSequence, now: float) -> None:
        if sequence.attempt in self._waiting and now >= sequence.deadline:
            self._end(sequence, now, "failed", "deadline_exceeded")

    def _on_drain_started(self, event: w.DrainStarted, now: float) -> None:
        """What has not begun is given up at once: another node begins it sooner."""
        super()._on_drain_started(event, now)
        for sequence in list(self._waiting.values()):
            self._give_up(sequence, now, "shutting down")

    # -- computing and streaming -----------------------------------------------------------------------------------

    def _runnable(self, ready: list[PrefillSequence], now: float) -> list[PrefillSequence]:
        return ready

    def _start(self, sequence: PrefillSequence) -> None:
        super()._start(sequence)
        attempt, keys = sequence.attempt, sequence.keys
        if sequence.target is not None:
            sequence.handoff_open = True
            self._commands.append(OpenHandoff(attempt, sequence.target, sequence.table()))
        if sequence.pool_node is not None and keys:
            sequence.pool_open = True
            pages = tuple(sequence.pages[: len(keys)])
            self._commands.append(
                OpenPoolWrite(attempt, sequence.pool_node, self.worker.namespace, 0, keys, pages)
            )
        have = sequence.computed // self.worker.block_tokens
        if have and (sequence.handoff_open or sequence.pool_open):
            self._commands.append(
                SendBlocks(attempt, 0, have, to_handoff=sequence.handoff_open, to_pool=sequence.pool_open)
            )

    def _sampled(self, sequence: PrefillSequence, delta: TokenDelta, now: float) -> None:
        del self._active[sequence.attempt]
        if delta.finish is not None:
            self._end(sequence, now)
        elif not sequence.handoff_open:
            self._end(sequence, now, "moved", "the hand-over failed")
        else:
            sequence.handoff_closing = sequence.handoff_committed = True
            self._commands.append(
                CommitHandoff(
                    sequence.attempt,
                    len(sequence.pages),
                    delta.tokens[0],
                    delta.logprobs[0] if delta.logprobs else None,
                    sequence.answer.cached_tokens or 0,
                )
            )
            self._commit_pool_write(sequence)

    def _on_handoff_ended(self, event: HandoffEnded, now: float) -> None:
        sequence = self._known.get(event.attempt)
        if sequence is None or not sequence.handoff_open:
            self._late()
            return
        sequence.handoff_open = False
        if sequence.ended:
            self._free_if_quiet(sequence)
        elif event.ok and sequence.handoff_committed:
            self._end(sequence, now)
        else:
            self.counters["handoffs_failed"] += 1
            self._end(sequence, now, "moved", event.error or "the hand-over failed")

    # -- ending ----------------------------------------------------------------------------------------------------

    def _retire(self, sequence: PrefillSequence, now: float) -> None:
        self._waiting.pop(sequence.attempt, None)
        super()._retire(sequence, now)

    def _close_streams(self, sequence: PrefillSequence, now: float) -> None:
        """The hand-over is given up unless it is committed; what was computed right still goes to the pool."""
        void = sequence.void or sequence.answer.finish == "failed"
        abort_handoff = sequence.handoff_open and not sequence.handoff_closing
        abort_pool = void and sequence.pool_open and not sequence.pool_closing
        if abort_handoff or abort_pool:
            sequence.handoff_closing |= abort_handoff
            sequence.pool_closing |= abort_pool
            self._commands.append(AbortStreams(sequence.attempt, handoff=abort_handoff, pool=abort_pool))
        self._commit_pool_write(sequence)

    def _commit_pool_write(self, sequence: PrefillSequence) -> None:
        if sequence.pool_open and not sequence.pool_closing:
            sequence.pool_closing = True
            self._commands.append(CommitPoolWrite(sequence.attempt))

    def _tally(self) -> tuple[int, int, int]:
        return len(self._active), len(self._waiting), 0

    def check(self) -> None:
        super().check()
        assert set(self._waiting) <= set(self._live)
        assert not set(self._waiting) & set(self._active), "a job waits and runs"
        for attempt, s in self._live.items():
            handing_over = s.handoff_committed and s.handoff_open
            assert (attempt in self._waiting) + (attempt in self._active) + handing_over == 1, (
                f"{attempt} is lost"
            )
            assert not (attempt in self._waiting and s.pages), f"{attempt} waits with pages"


def new_sequence(job: PrefillJob, prompt_tokens: int, now: float) -> PrefillSequence:
    """One that wants a single token never hands over."""
    hands_over = job.handoff is not None and job.max_new_tokens > 1
    sequence = PrefillSequence(
        attempt=job.attempt,
        gateway=job.gateway,
        prompt_tokens=prompt_tokens,
        max_new_tokens=job.max_new_tokens if hands_over else 1,
        sampling=job.sampling,
        keys=job.block_keys,
        tokens=job.tokens,
        sources=job.sources,
        pool_node=job.pool,
        answer=Answer(job.first_index),
    )
    sequence.target = job.handoff if hands_over else None
    sequence.deadline = now + job.budget_s if job.budget_s > 0 else 0.0
    return sequence
