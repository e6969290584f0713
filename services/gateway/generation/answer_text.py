"""Turns the tokens of one answer into text."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.api.answer import TokenEntry, Update
from services.gateway.generation.stop import StopFinder
from shared.protocol.sampling import TokenLogprob
from shared.text.detokenize import Detokenizer


class AnswerText:
    """Fed tokens; gives text that cannot change any more, with the tokens it is made of."""

    def __init__(self, detokenizer: Detokenizer, stops: StopFinder, without_text: Sequence[int] = ()) -> None:
        """`without_text`: tokens that end the answer and are not part of its text."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._without_text = frozenset(without_text)
        self._decoded_chars = 0
        self._told_chars = 0
        self._held: list[tuple[int, TokenEntry]] = []
        """Tokens whose text has not been sent, with where it ends. Those of a stop string are never sent."""

    @property
    def stopped(self) -> bool:
        return self._stops.met

    def push(self, token: int, logprob: TokenLogprob | None, update: Update) -> None:
        offset = self._decoded_chars
        text = "" if token in self._without_text else self._detokenizer.push(token)
        self._decoded_chars += len(text)
        if logprob is not None:
            self._held.append((self._decoded_chars, TokenEntry(token, logprob, offset)))
        self._tell(self._stops.push(text), update)

    def finish(self, update: Update) -> None:
        """The answer ended without a stop string: give out what was held back."""
        last = self._stops.push(self._detokenizer.finish())
        self._tell(last + self._stops.finish(), update)
        if not self.stopped:
            update.entries += [entry for _, entry in self._held]
            self._held.clear()

    def _tell(self, text: str, update: Update) -> None:
        update.text += text
        self._told_chars += len(text)
        while self._held and self._held[0][0] <= self._told_chars:
            update.entries.append(self._held.pop(0)[1])
