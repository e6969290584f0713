"""A prompt at a prefill node: a sequence whose KV is streamed on while it is computed."""

from __future__ import annotations

from shared.core.worker.answers import Answer
from shared.core.worker.sequence import SequenceState
from shared.protocol.requests import HandoffTarget, PrefillJob


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
