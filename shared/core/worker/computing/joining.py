"""Prompts that share a prefix which a neighbour on the same node is computing: they wait for it, and reuse it.

Without that, prompts that arrive together would each compute what they share, at the same time, on the same engine.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from shared.core.worker.computing.prefix import reusable
from shared.core.worker.sequence import SequenceState
from shared.protocol.ids import BlockKey

S = TypeVar("S", bound=SequenceState)


class Joining(Generic[S]):
    """Who computes which block now. A sequence that waits always waits for one that runs or has ended, so nobody waits
    for ever: whoever ends, for any reason, is waited for no more."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._computes: dict[BlockKey, S] = {}

    def waits(self, sequence: S) -> bool:
        """Whether a neighbour is computing the block that this sequence needs next. If not, the sequence now is the one
        that computes its blocks."""
        have = sequence.computed // self._block_tokens
        most = reusable(sequence, self._block_tokens)
        keys = sequence.keys
        if have < most:
            other = self._computes.get(keys[have])
            if other is not None and other is not sequence:
                return True
        for key in keys[have:]:
            self._computes.setdefault(key, sequence)
        return False

    def retired(self, sequence: S) -> None:
        """It computes nothing any more."""
        computes = self._computes
        for key in sequence.keys:
            if computes.get(key) is sequence:
                del computes[key]

    def check(self, live: dict[str, S]) -> None:
        for other in self._computes.values():
            assert other.attempt in live, f"{other.attempt} has ended and is waited for"
