"""A small robust online regression: seconds = sum of weight[i] * feature[i], weights >= 0.

Least squares of relative errors with forgetting, pulled weakly towards the prior's shape, so that directions
the samples never excite (no long prompt seen yet) keep the prior's proportions at the measured scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

MIN_SAMPLES = 4
"""With fewer samples the prior is used unchanged."""
RECENT = 8
"""How many of the last samples are kept to detect that the model as a whole is wrong."""
OFF = 2.0
"""The fit restarts when all recent measurements differ from the prediction by this factor in the same direction."""
FORGET = 0.99
PULL = 1e-5
"""Weight of the prior's shape: just enough to decide what the samples leave open."""
TOO_FAST = 10.0
"""A sample counts as at most this factor faster than the scaled prior."""


class LinearFit:
    """Weights over few features. Deterministic and O(features^3) a sample."""

    def __init__(self, prior: Sequence[float]) -> None:
        if not any(w > 0.0 for w in prior) or any(w < 0.0 for w in prior):
            raise ValueError("a prior needs weights >= 0, one of them > 0")
        self._prior = tuple(prior)
        self._weights = tuple(prior)
        self._recent: list[tuple[tuple[float, ...], float]] = []
        self.samples = 0
        self._restart(1.0)

    def weights(self) -> tuple[float, ...]:
        return self._weights

    def predict(self, features: Sequence[float]) -> float:
        return sum(w * x for w, x in zip(self._weights, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add a sample. Ignored if `seconds` is not positive and finite, or if the prior predicts 0 s for it."""
        if not 0.0 < seconds < math.inf or self._shape(features) <= 0.0:
            return
        self.samples += 1
        self._recent.append((tuple(features), seconds))
        del self._recent[:-RECENT]
        if self.samples < MIN_SAMPLES:
            return
        if self.samples == MIN_SAMPLES or self._is_off():
            self._restart(median(s / self._shape(f) for f, s in self._recent))
            for f, s in self._recent:
                self._add(f, s)
        else:
            self._add(features, seconds)
        self._weights = self._solved()

    def _shape(self, features: Sequence[float]) -> float:
        """The time the prior predicts."""
        return sum(w * x for w, x in zip(self._prior, features, strict=True))

    def _is_off(self) -> bool:
        """Whether all recent samples are far off in the same direction: then the model is wrong, they are no outliers."""
        if len(self._recent) < RECENT:
            return False
        ratios = [s / p if (p := self.predict(f)) > 0.0 else math.inf for f, s in self._recent]
        return min(ratios) >= OFF or max(ratios) <= 1 / OFF

    def _restart(self, scale: float) -> None:
        n = len(self._prior)
        self._weights = tuple(w * scale for w in self._prior)
        self._scale = scale
        self._gram = [[0.0] * n for _ in range(n)]
        self._moment = [0.0] * n

    def _add(self, features: Sequence[float], seconds: float) -> None:
        """Add one sample to the decayed normal equations, in multiples of the scaled prior.

        Errors are relative to the measured time, so the relative error of a stall is at most 1, however long it was.
        """
        seconds = max(seconds, self._scale * self._shape(features) / TOO_FAST)
        z = [w * self._scale * x / seconds for w, x in zip(self._prior, features, strict=True)]
        for i, zi in enumerate(z):
            row = self._gram[i]
            self._moment[i] = self._moment[i] * FORGET + zi
            for j, zj in enumerate(z):
                row[j] = row[j] * FORGET + zi * zj

    def _solved(self) -> tuple[float, ...]:
        """Non-negative weights: solve, drop the most negative multiple, solve again."""
        active = [i for i, w in enumerate(self._prior) if w > 0.0]
        multiples = [0.0] * len(self._prior)
        while active:
            found = _solve(
                [[self._gram[i][j] + (PULL if i == j else 0.0) for j in active] for i in active],
                [self._moment[i] + PULL for i in active],
            )
            worst = min(range(len(active)), key=found.__getitem__)
            if found[worst] >= 0.0:
                for i, m in zip(active, found, strict=True):
                    multiples[i] = m
                break
            del active[worst]
        return tuple(w * self._scale * m for w, m in zip(self._prior, multiples, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination for a small symmetric positive definite system."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    for i in range(n):
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, n + 1):
                rows[k][j] -= factor * rows[i][j]
    out = [0.0] * n
    for i in reversed(range(n)):
        out[i] = (rows[i][n] - sum(rows[i][j] * out[j] for j in range(i + 1, n))) / rows[i][i]
    return out
