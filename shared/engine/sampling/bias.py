"""What a bias adds to a logit: one rule for the engine that samples in batches and for the toy."""

from __future__ import annotations

import math

from shared.protocol.sampling import BIAS_MOST

FORCE = 1e4
"""Added for the greatest bias: more than logits ever differ."""


def added(bias: float) -> float:
    """Minus infinity bans the token; otherwise the bias itself, or FORCE for the greatest."""
    if bias <= -BIAS_MOST:
        return -math.inf
    return FORCE if bias >= BIAS_MOST else bias
