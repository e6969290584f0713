"""Stop strings. No byte of one is ever sent, and the text does not depend on how tokens split it."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """State of one answer. Fed one token's text at a time; holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string. Sets `met` when one is complete."""
        if self.met:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.met, self._held = True, ""
            return text[: min(found)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back so far: given out when an answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
