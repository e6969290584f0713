"""Turns the logits of a step's sequences into their next tokens. The model engine samples only through this module."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.engine.sampling.draw_batch import Changed, Drawn, draw
from shared.engine.sampling.reshape import Row, fault, reshape
from shared.protocol.sampling import SamplingParams
from shared.text.grammar import Follower, GrammarError, error_of

NO_GRAMMARS = "this model has no tokenizer that grammars can be followed with"


class Sampler:
    """Keeps the states of grammars as a cache; each can be computed again from a step. Not thread-safe."""

    def __init__(self, follower: Follower | None = None) -> None:
        self._follower = follower

    def sample(self, logits: torch.Tensor, sequences: Sequence[SequenceStep]) -> list[SequenceResult]:
        """One result for each sequence, from its row of `logits` [rows, vocab]. All sequences must have `sample` set. A
        sequence that cannot be sampled gets an error, and the others are not affected."""
        params = [_params(sequence) for sequence in sequences]
        positions = [sequence.start + sequence.tokens for sequence in sequences]
        which = [i for i, p in enumerate(params) if p.reshapes]
        logits = logits.float()
        changed, errors = self._change(logits, sequences, which) if which else (None, {})
        drawn = draw(logits, params, positions, changed)
        return [
            _result(sequence, Drawn(error=errors[i]) if i in errors else token)
            for i, (sequence, token) in enumerate(zip(sequences, drawn, strict=True))
        ]

    def _change(
        self, logits: torch.Tensor, sequences: Sequence[SequenceStep], which: Sequence[int]
    ) -> tuple[Changed | None, dict[int, str]]:
        """Change the logits of the rows `which`. Returns the changed rows, and an error for each row that cannot be
        changed: {row: reason}."""
        rows, good, errors = [], [], {}
        for i in which:
            try:
                row = self._row(sequences[i])
            except GrammarError as e:
                errors[i] = error_of(e)
                continue
            if error := fault(row, logits.shape[1]):
                errors[i] = error
            else:
                rows.append(row)
                good.append(i)
        if not good:
            return None, errors
        new = (logits if len(good) == len(logits) else logits[good]).double()
        reshape(new, rows)
        return Changed(good, new), errors

    def _row(self, sequence: SequenceStep) -> Row:
        params = _params(sequence)
        if params.grammar is None:
            return Row(params, sequence.past, sequence.answered)
        if self._follower is None:
            raise GrammarError(NO_GRAMMARS)
        answer = sequence.past[len(sequence.past) - 4 * sequence.answered :]
        following = self._follower.next(sequence.attempt, params.grammar, answer)
        return Row(params, sequence.past, sequence.answered, following.allowed, following.complete)


def _params(sequence: SequenceStep) -> SamplingParams:
    assert sequence.sample is not None
    return sequence.sample


def _result(sequence: SequenceStep, drawn: Drawn) -> SequenceResult:
    if drawn.error:
        return SequenceResult(sequence.attempt, error=drawn.error)
    return SequenceResult(sequence.attempt, (drawn.token,), () if drawn.logprob is None else (drawn.logprob,))
