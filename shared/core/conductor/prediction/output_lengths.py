"""How many tokens answers have, learnt from those that ended: a decaying histogram over geometric buckets."""

from __future__ import annotations

from math import exp, log2

PER_OCTAVE = 4
BUCKETS = 20 * PER_OCTAVE
"""Up to a million tokens."""
PRIOR_MEAN_TOKENS = 256.0
"""Before anything is learnt, lengths are taken as exponential with this mean."""
PRIOR_WEIGHT = 8.0
HALF_LIFE = 2000.0
"""After so many answers an old one counts half."""
REFRESH = 16
"""The table of shares is made anew after so many answers."""

_EDGES = [2.0 ** (i / PER_OCTAVE) for i in range(BUCKETS + 1)]


class OutputLengths:
    """The distribution of answers' lengths. Deterministic. A question takes constant time."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._longer: list[float] = []
        """_longer[i]: share of the answers that are longer than edge i."""
        self._growth = 2.0 ** (1.0 / HALF_LIFE)
        self._weight = 1.0
        self._fresh = 0
        self._refresh()

    def observe(self, tokens: float) -> None:
        """An answer ended after so many tokens. Those of fewer than one are ignored."""
        if tokens < 1.0:
            return
        self._counts[min(int(log2(tokens) * PER_OCTAVE), BUCKETS - 1)] += self._weight
        self._weight *= self._growth
        self._fresh += 1
        if self._fresh >= REFRESH:
            self._refresh()

    def longer(self, tokens: float) -> float:
        """Share of the answers that have more tokens. Never 0."""
        if tokens <= 1.0:
            return 1.0
        place = log2(tokens) * PER_OCTAVE
        i = int(place)
        if i >= BUCKETS:
            return self._longer[-1]
        low = self._longer[i]
        return low + (self._longer[i + 1] - low) * (place - i)

    def still_there(self, age_tokens: float, ahead_tokens: float) -> float:
        """Probability that an answer which has `age_tokens` goes on for more than `ahead_tokens` further ones."""
        return self.longer(age_tokens + ahead_tokens) / self.longer(age_tokens)

    def left(self, age_tokens: float) -> float:
        """Expected number of tokens that an answer of `age_tokens` still gets."""
        now, total, before = self.longer(age_tokens), 0.0, max(1.0, age_tokens)
        for i in range(int(log2(before) * PER_OCTAVE), BUCKETS):
            edge = _EDGES[i + 1]
            total += (edge - before) * (self._longer[i] + self._longer[i + 1]) / 2
            before = edge
        return max(1.0, total / now)

    @property
    def mean(self) -> float:
        return self.left(0.0)

    def _refresh(self) -> None:
        self._fresh = 0
        scale = 1.0 / self._weight
        counts = self._counts = [count * scale for count in self._counts]
        self._weight = 1.0
        known = sum(counts)
        total = known + PRIOR_WEIGHT
        longer, left = [], known
        for edge, count in zip(_EDGES, [*counts, 0.0], strict=True):
            prior = PRIOR_WEIGHT * exp(-edge / PRIOR_MEAN_TOKENS)
            longer.append(max((left + prior) / total, 1e-9))
            left -= count
        self._longer = longer
