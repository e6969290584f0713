"""A small online regression for times: seconds = sum of weight[i] * feature[i], weights >= 0.

It estimates the mean: on a node that other work slows down now and then, the sum of predictions is what the node's queue
really takes. Samples are weighted by the time predicted for them, never by the time measured. Weights that depend on the
measured time would favour the fast samples and make every prediction too low.

The prior, usually from a calibration, counts as a few samples. Directions that samples never excite (no long prompt seen
yet) keep its proportions at the measured scale. When the latest samples say that a node has become another one, what was
learnt before is forgotten at once, but for its proportions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

FORGET = 0.99
PRIOR_SAMPLES = 2.0
"""How many samples the prior's scale counts as."""
PULL = 1e-4
"""How many samples the prior's proportions count as: just enough to decide what the samples leave open."""
FIRST = 4
"""With fewer samples the prior is used unchanged."""
MOST_RATIO = 3.0
"""A sample counts as at most so many times the predicted time: a suspended process is no measurement. Contention is, also
where half the samples take ten times as long: once the mean is found, none of them is over this."""
LEAST_EXCESS = 0.5
SPREADS = 3.0
"""Where samples scatter little, one counts as at most 1 + LEAST_EXCESS times the predicted time, or so many standard
deviations more than it."""
LATEST = 8
"""So many samples decide whether the node has changed."""
AGREE = 7
"""So many of them must be off in the same direction."""
OFF = 0.2
SURE = 4.0
"""Their mean must be off by so many times its own uncertainty, as far as earlier samples show it."""
LEAST_SPREAD = 0.1


class LinearFit:
    """Weights over few features. Deterministic and O(features^3) a sample."""

    def __init__(self, prior: Sequence[float]) -> None:
        if not any(w > 0.0 for w in prior) or any(w < 0.0 for w in prior):
            raise ValueError("a prior needs weights >= 0, one of them > 0")
        self.samples = 0
        self._base = self._weights = tuple(prior)
        self._latest: deque[float] = deque(maxlen=LATEST)
        """Measured times in multiples of the predicted ones."""
        self._first: list[tuple[tuple[float, ...], float]] = []
        self._spread_weight = 0.0
        self._spread_sum = 0.0
        self._begin(self._base)

    def weights(self) -> tuple[float, ...]:
        return self._weights

    def predict(self, features: Sequence[float]) -> float:
        return sum([w * x for w, x in zip(self._weights, features, strict=True)])

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add a sample. Ignored if `seconds` is not positive and finite, or if the prior predicts 0 s for it."""
        shape = sum([w * x for w, x in zip(self._base, features, strict=True)])
        if not 0.0 < seconds < math.inf or not 0.0 < shape < math.inf:
            return
        self.samples += 1
        if self.samples <= FIRST:
            self._first.append((tuple(features), seconds))
            if self.samples == FIRST:
                self._begin_with_first()
            return
        predicted = self._predicted(features)
        self._remember(seconds / predicted)
        if self._has_changed():
            self._begin_anew()
        else:
            self._add(features, predicted, seconds)
            self._weights = self._solved()

    def _predicted(self, features: Sequence[float]) -> float:
        """Never 0: the base has a time for whatever is taken in."""
        predicted = self.predict(features)
        if predicted > 0.0:
            return predicted
        return sum([w * x for w, x in zip(self._base, features, strict=True)])

    def _begin_with_first(self) -> None:
        """If all of the first samples say so, the prior has the right shape at another scale."""
        ratios = [seconds / self._predicted(features) for features, seconds in self._first]
        if min(ratios) > 1.0 + OFF or max(ratios) < 1.0 - OFF:
            scale = median(ratios)
            self._begin(tuple([w * scale for w in self._base]))
        for features, seconds in self._first:
            self._add(features, self._predicted(features), seconds)
        self._weights = self._solved()
        self._first.clear()

    # -- has the node changed? -----------------------------------------------------------------------------------------

    def _remember(self, ratio: float) -> None:
        """What leaves the latest samples tells how far single samples scatter."""
        latest = self._latest
        if len(latest) == LATEST:
            self._spread_weight = self._spread_weight * FORGET + 1.0
            self._spread_sum = self._spread_sum * FORGET + (min(latest[0], MOST_RATIO) - 1.0) ** 2
        latest.append(ratio)

    def _has_changed(self) -> bool:
        latest = self._latest
        if len(latest) < LATEST:
            return False
        mean = self._latest_mean()
        above = mean > 1.0
        agree = sum([(r > 1.0 + OFF) if above else (r < 1.0 - OFF) for r in latest])
        if agree < AGREE:
            return False
        return abs(mean - 1.0) > SURE * self._spread() / math.sqrt(LATEST)

    def _spread(self) -> float:
        """Standard deviation of single samples, in multiples of what is predicted for them."""
        weight = self._spread_weight
        return max(LEAST_SPREAD, math.sqrt(self._spread_sum / weight)) if weight else LEAST_SPREAD

    def _latest_mean(self) -> float:
        """Of the latest samples, none counted for more than MOST_RATIO times their median."""
        most = MOST_RATIO * median(self._latest)
        return sum([min(r, most) for r in self._latest]) / len(self._latest)

    def _begin_anew(self) -> None:
        """Keep the proportions only."""
        factor = self._latest_mean()
        least = [1e-3 * self._scale * w for w in self._base]
        self._begin(tuple([max(w, low) * factor for w, low in zip(self._weights, least, strict=True)]))
        self._latest.clear()

    # -- the regression, in multiples of the base ------------------------------------------------------------------------

    def _begin(self, base: tuple[float, ...]) -> None:
        n = len(base)
        self._base = self._weights = base
        self._gram = [[0.0] * n for _ in range(n)]
        self._moment = [0.0] * n
        self._scale = 1.0
        self._scale_weight = self._scale_sum = PRIOR_SAMPLES

    def _add(self, features: Sequence[float], predicted: float, seconds: float) -> None:
        most = min(MOST_RATIO, 1.0 + max(LEAST_EXCESS, SPREADS * self._spread()))
        ratio = min(seconds / predicted, most)
        z = [w * x / predicted for w, x in zip(self._base, features, strict=True)]
        for i, zi in enumerate(z):
            row = self._gram[i]
            self._moment[i] = self._moment[i] * FORGET + zi * ratio
            for j, zj in enumerate(z):
                row[j] = row[j] * FORGET + zi * zj
        whole = sum(z)
        self._scale_weight = self._scale_weight * FORGET + whole * whole
        self._scale_sum = self._scale_sum * FORGET + whole * ratio
        self._scale = self._scale_sum / self._scale_weight

    def _solved(self) -> tuple[float, ...]:
        """Non-negative weights: solve, drop the most negative multiple, solve again. Each multiple is pulled to the
        scale."""
        gram, moment, scale, base = self._gram, self._moment, self._scale, self._base
        active = [i for i, w in enumerate(base) if w > 0.0]
        multiples = [0.0] * len(base)
        while active:
            found = _solve(
                [[gram[i][j] + (PULL if i == j else 0.0) for j in active] for i in active],
                [moment[i] + PULL * scale for i in active],
            )
            worst = min(range(len(active)), key=found.__getitem__)
            if found[worst] >= 0.0:
                for i, m in zip(active, found, strict=True):
                    multiples[i] = m
                break
            del active[worst]
        return tuple([w * m for w, m in zip(base, multiples, strict=True)])


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
        out[i] = (rows[i][n] - sum([rows[i][j] * out[j] for j in range(i + 1, n)])) / rows[i][i]
    return out
