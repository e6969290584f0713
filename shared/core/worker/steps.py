"""Engine steps: the inert plan a batching machine hands to an engine, and what comes back."""

from __future__ import annotations

from msgspec import Struct

from shared.core.machine import Command, Event
from shared.protocol.ids import AttemptId
from shared.protocol.sampling import SamplingParams, TokenLogprob


class SequenceStep(Struct, frozen=True):
    """Compute tokens `start .. start+n-1` of one sequence, attending to everything before them.

    Position p's KV goes to page `pages[p // block_tokens]`, row `p % block_tokens`. With `sample` set, the token at
    position `start+n` is drawn from the last computed token's logits.
    """

    attempt: AttemptId
    start: int
    tokens: int
    """How many to compute (n)."""
    token_ids: bytes
    """Their ids, little-endian u32. Empty in the simulator, which needs none."""
    pages: tuple[int, ...]
    sample: SamplingParams | None = None
    past: bytes = b""
    """Where the sampling looks back: ids of the answer's tokens so far, in all attempts, after those of the prompt if it
    looks at that too."""
    answered: int = 0
    """How many of `past`'s tokens are the answer's."""


class RunStep(Command, frozen=True):
    """Run one engine step over a batch. Ends in StepDone or StepFailed. At most one is out at a time.

    `up_to` > 1 allows (never obliges) an engine to repeat a pure decode step that many times, feeding each sampled
    token back, before it reports; live engines run one so that tokens stream, the simulator uses it to skip ahead.
    An engine that repeats stops after the current step when told InterruptRun.
    """

    step: int
    sequences: tuple[SequenceStep, ...]
    up_to: int = 1


class InterruptRun(Command, frozen=True):
    """The batch wants to change: report after the step that is running. No-op when only one was allowed."""

    step: int


class SequenceResult(Struct, frozen=True):
    attempt: AttemptId
    tokens: tuple[int, ...] = ()
    """One per repeated step; empty when nothing was sampled."""
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str = ""
    """Set when this sequence alone failed (e.g. NaN logits); its neighbours are unaffected."""


class StepDone(Event, frozen=True):
    step: int
    results: tuple[SequenceResult, ...]
    steps: int = 1
    """How many repeats were run."""
    seconds: float = 0.0
    """Engine time, for fitting the cost model."""


class StepFailed(Event, frozen=True):
    """The whole step failed; no KV it wrote may be trusted."""

    step: int
    error: str
