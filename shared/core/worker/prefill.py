"""The prefill role: prompts in, first tokens out, KV streamed on while it is computed.

    submitted -> waiting (for a place and pages) -> prefix fetched -> chunks computed, streaming -> first token
                                                                   -> handed over -> pages free

Jobs are taken first come, first served. A job is live until its KV is handed over (or it ended before); its blocks stay
cached in the node's own memory until their pages are needed.
"""

from __future__ import annotations

from itertools import islice

from shared.core.kv.block_keys import TOKEN_BYTES, blocks_for
from shared.core.machine import Ticked
from shared.core.worker import events as w
from shared.core.worker.computing.prefix import take_pages
from shared.core.worker.config import PrefillConfig
from shared.core.worker.leases import Timers
from shared.core.worker.machine import WorkerMachine
from shared.core.worker.prefill_sequence import PrefillSequence, new_sequence
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
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import AttemptId
from shared.protocol.requests import Accepted, PrefillJob, TokenDelta

MOST_LOOKED_AT = 16
"""Waiting prompts among which one is looked for that fits into a gap."""


class PrefillMachine(WorkerMachine[PrefillSequence]):
    """See core.machine.Machine. Each accepted attempt gets exactly one ending: a delta with its finish, a hand-over
    (its first token was sent, the decode node goes on), or silence when its owner cancelled it or is gone."""

    role = "prefill"
    cost_kind = "prefill"

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config)
        self.config = config
        self._deadlines = Timers()
        self._waiting = self._table.waiting
        self._active = self._table.active
        self._blocked: tuple[AttemptId, int] | None = None
        """The head of the queue that found too few pages, and how many there were."""
        self._handlers |= {
            w.JobSubmitted: self._on_submitted,
            w.DrainStarted: self._on_drain_started,
            HandoffEnded: self._on_handoff_ended,
            Ticked: self._on_ticked,
        }

    # -- coming in -------------------------------------------------------------------------------------------------

    def _on_submitted(self, event: w.JobSubmitted, now: float) -> None:
        job, table = event.job, self._table
        past = table.ended_answers.get(job.attempt)
        if job.attempt in table.known or (past is not None and past.started):
            self._out.reply(event.ask, Accepted(job.attempt))
            return
        prompt_tokens = job.prompt_tokens or len(job.tokens) // TOKEN_BYTES
        error = self._unfit(job, prompt_tokens, now) or table.admit_owner(job, now)
        if error is not None:
            table.refuse(event.ask, job, error)
            return
        sequence = new_sequence(job, prompt_tokens, now)
        table.accept(sequence)
        sequence.came_s = now
        self._predictions.accepted(sequence, now)
        if sequence.deadline:
            self._deadlines.set(sequence.deadline, sequence.attempt)
        self._out.reply(event.ask, Accepted(job.attempt))

    def _unfit(self, job: PrefillJob, prompt_tokens: int, now: float) -> TsukimiError | None:
        config = self.worker
        return (
            misfit(config, job, prompt_tokens)
            or bad_tokens(config, job.tokens, prompt_tokens)
            or never_fits(config, prompt_tokens)
            or (overloaded("the prefill queue is full", self._place_in_s(now)) if self._full() else None)
        )

    def _full(self) -> bool:
        return len(self._waiting) >= self.worker.max_waiting

    def _place_in_s(self, now: float) -> float:
        """When the queue will be one shorter."""
        live = self._table.live
        return self._predictions.queue_s(live.values(), now) / max(1, len(live))

    def _on_ticked(self, event: Ticked, now: float) -> None:
        for attempt in self._deadlines.due(now):
            sequence = self._waiting.get(attempt)
            if sequence is not None and now >= sequence.deadline:
                self._table.end(sequence, now, "failed", "deadline_exceeded")
        self._table.ticked(event, now)

    def _on_drain_started(self, event: w.DrainStarted, now: float) -> None:
        """What has not begun is given up at once: another node begins it sooner."""
        self._table.drain_started(event, now)
        for sequence in list(self._waiting.values()):
            self.give_up(sequence, now, "shutting down")

    # -- computing and streaming -----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        while self._waiting:
            place = len(self._active) < self.worker.max_running
            if not (self._begin_first(now) if place else self._begin_meanwhile(now)):
                break
        if self._active and self._computation.inflight.out is None:
            self._run_planned(now)

    def _begin_meanwhile(self, now: float) -> bool:
        """Let a prompt begin that is predicted to be done before those that hold all places get the blocks they wait for.
        Without that, the engine would idle."""
        if len(self._active) > self.worker.max_running or self._computation.inflight.out is not None:
            return False
        gap_s = self._predictions.gap_s(self._active.values(), now)
        if not gap_s:
            return False
        for sequence in islice(self._waiting.values(), MOST_LOOKED_AT):
            if sequence.expected_s <= gap_s and not self._predictions.awaits(sequence):
                return self._begin(sequence, now)
        return False

    def _begin_first(self, now: float) -> bool:
        """Let the first that waits begin, or end it if it is too late; False if there are no pages for it."""
        return self._begin(next(iter(self._waiting.values())), now)

    def _begin(self, sequence: PrefillSequence, now: float) -> bool:
        if sequence.deadline and now >= sequence.deadline:
            self._table.end(sequence, now, "failed", "deadline_exceeded")
            return True
        if self._blocked == (sequence.attempt, self.pool.available):
            return False
        blocks = blocks_for(sequence.prompt_tokens, self.worker.block_tokens)
        if not take_pages(self.pool, sequence, blocks, self.worker.block_tokens):
            self._blocked = (sequence.attempt, self.pool.available)
            return False
        self._computation.begin(sequence, now)
        return True

    def _run_planned(self, now: float) -> None:
        """Launch a step of all that are ready, if there are any."""
        plan, begun = self._computation.plan(self._computation.ready())
        for sequence in begun:
            self._open_streams(sequence)
        if plan:
            self._computation.launch(plan, now)

    def _open_streams(self, sequence: PrefillSequence) -> None:
        """To where the KV goes from here; what was reused is sent at once."""
        attempt, keys = sequence.attempt, sequence.keys
        commands = self._out.commands
        if sequence.target is not None:
            sequence.handoff_open = True
            commands.append(OpenHandoff(attempt, sequence.target, sequence.table()))
        if sequence.pool_node is not None and keys:
            sequence.pool_open = True
            pages = tuple(sequence.pages[: len(keys)])
            commands.append(OpenPoolWrite(attempt, sequence.pool_node, self.worker.namespace, 0, keys, pages))
        have = sequence.computed // self.worker.block_tokens
        if have and (sequence.handoff_open or sequence.pool_open):
            commands.append(
                SendBlocks(attempt, 0, have, to_handoff=sequence.handoff_open, to_pool=sequence.pool_open)
            )

    # -- handing over ----------------------------------------------------------------------------------------------

    def sampled(self, sequence: PrefillSequence, delta: TokenDelta, now: float) -> None:
        del self._active[sequence.attempt]
        if delta.finish is not None:
            self._table.end(sequence, now)
        elif not sequence.handoff_open:
            self._table.end(sequence, now, "moved", "the hand-over failed")
        else:
            sequence.handoff_closing = sequence.handoff_committed = True
            self._out.commands.append(
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
        table = self._table
        sequence = table.known.get(event.attempt)
        if sequence is None or not sequence.handoff_open:
            table.late()
            return
        sequence.handoff_open = False
        if sequence.ended:
            table.free_if_quiet(sequence)
        elif event.ok and sequence.handoff_committed:
            table.end(sequence, now)
        else:
            self.counters["handoffs_failed"] += 1
            table.end(sequence, now, "moved", event.error or "the hand-over failed")

    # -- ending ----------------------------------------------------------------------------------------------------

    def give_up(self, sequence: PrefillSequence, now: float, why: str) -> None:
        self._table.end(sequence, now, "moved", why)

    def close(self, sequence: PrefillSequence, now: float) -> None:
        """The hand-over is given up unless it is committed; what was computed right still goes to the pool."""
        void = sequence.void or sequence.answer.finish == "failed"
        abort_handoff = sequence.handoff_open and not sequence.handoff_closing
        abort_pool = void and sequence.pool_open and not sequence.pool_closing
        if abort_handoff or abort_pool:
            sequence.handoff_closing |= abort_handoff
            sequence.pool_closing |= abort_pool
            self._out.commands.append(AbortStreams(sequence.attempt, handoff=abort_handoff, pool=abort_pool))
        self._commit_pool_write(sequence)

    def _commit_pool_write(self, sequence: PrefillSequence) -> None:
        if sequence.pool_open and not sequence.pool_closing:
            sequence.pool_closing = True
            self._out.commands.append(CommitPoolWrite(sequence.attempt))

    def check(self) -> None:
        super().check()
        for attempt, s in self._table.live.items():
            handing_over = s.handoff_committed and s.handoff_open
            assert (attempt in self._waiting) + (attempt in self._active) + handing_over == 1, (
                f"{attempt} is lost"
            )
            assert not (attempt in self._waiting and s.pages), f"{attempt} waits with pages"
