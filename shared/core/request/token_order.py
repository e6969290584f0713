"""One answer's tokens, put in order by index: what came twice is dropped, what came early waits."""

from __future__ import annotations

from shared.protocol.requests import TokenDelta
from shared.protocol.sampling import TokenLogprob


class TokenOrder:
    """Holds the tokens of one answer. Never holds one past `most`; not concurrent."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens: list[int] = []
        """The answer so far, without a hole."""
        self.next_index = 0
        """How many those are."""
        self.early: dict[int, tuple[int, TokenLogprob | None]] = {}
        self.duplicates = 0

    @property
    def gap(self) -> bool:
        """A later token is here, the next is not."""
        return bool(self.early)

    def add(self, delta: TokenDelta) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Take a delta; returns the tokens that are next in line now, with their logprobs (all or none)."""
        if delta.index == self.next_index and not self.early:  # nearly always
            tokens = delta.tokens[: self.most - delta.index]
            self.tokens.extend(tokens)
            self.next_index += len(tokens)
            return tokens, delta.logprobs[: len(tokens)]
        for offset, token in enumerate(delta.tokens):
            index = delta.index + offset
            if index < len(self.tokens) or index in self.early:
                self.duplicates += 1
            elif index < self.most:
                self.early[index] = token, delta.logprobs[offset] if delta.logprobs else None
        return self._advance()

    def forget_early(self) -> None:
        """Drop what came early: another attempt will make it again."""
        self.early.clear()

    def check(self) -> None:
        assert self.next_index == len(self.tokens), "the next index is not the next"
        assert len(self.tokens) <= self.most, f"{len(self.tokens)} tokens, at most {self.most} wanted"
        assert all(len(self.tokens) < i < self.most for i in self.early), f"out of range: {self.early}"

    def _advance(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        start = len(self.tokens)
        logprobs: list[TokenLogprob] = []
        while (entry := self.early.pop(len(self.tokens), None)) is not None:
            self.tokens.append(entry[0])
            if entry[1] is not None:
                logprobs.append(entry[1])
        self.next_index = len(self.tokens)
        return tuple(self.tokens[start:]), tuple(logprobs)
