"""What an attempt has answered so far, and a bounded memory of attempts that are over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.protocol.ids import AttemptId
from shared.protocol.requests import AttemptState, FinishReason, StageTimes, TokenDelta
from shared.protocol.sampling import TokenLogprob


@dataclass(slots=True)
class Answer:
    """The tokens of one attempt. Only grows."""

    first_index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Empty, or one per token."""
    finish: FinishReason | None = None
    error: str = ""
    retry_after_s: float = 0.0
    cached_tokens: int | None = None
    stages: StageTimes | None = None
    """Set with the first token where the prompt was computed."""
    started: bool = True
    """False: cancelled before it was ever asked for here."""

    def delta(self, attempt: AttemptId, from_index: int) -> TokenDelta | None:
        """All known tokens from an index on; None when there is nothing to tell."""
        skip = max(0, from_index - self.first_index)
        tokens = tuple(self.tokens[skip:])
        if not tokens and self.finish is None:
            return None
        return TokenDelta(
            attempt,
            self.first_index + min(skip, len(self.tokens)),
            tokens,
            tuple(self.logprobs[skip:]),
            self.finish,
            self.error,
            self.cached_tokens if skip == 0 and tokens else None,
            self.retry_after_s,
            self.stages if skip == 0 and tokens else None,
        )

    def state(
        self, attempt: AttemptId, state: Literal["waiting", "running", "finished"], from_index: int
    ) -> AttemptState:
        return AttemptState(attempt, state, self.delta(attempt, from_index))


class EndedAnswers:
    """Answers of ended attempts, kept for `keep_s` and at most `limit` of them: late questions still find them."""

    def __init__(self, keep_s: float, limit: int) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._answers: dict[AttemptId, tuple[float, Answer]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def remember(self, attempt: AttemptId, answer: Answer, now: float) -> None:
        self._answers.pop(attempt, None)
        self._answers[attempt] = (now + self._keep_s, answer)
        if len(self._answers) > self._limit:
            del self._answers[next(iter(self._answers))]

    def get(self, attempt: AttemptId) -> Answer | None:
        kept = self._answers.get(attempt)
        return kept[1] if kept else None

    def expire(self, now: float) -> None:
        while self._answers:
            attempt = next(iter(self._answers))
            if self._answers[attempt][0] > now:
                return
            del self._answers[attempt]
