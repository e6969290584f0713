"""Engine times that scatter, reproducibly."""

from __future__ import annotations

import random
from collections.abc import Callable

from shared.protocol.ids import NodeId


def noise_of(node: NodeId, sigma: float, seed: int) -> Callable[[], float] | None:
    """Draws factors for one node's runs, lognormal with mean 1; None where times are exact. The same seed gives the same
    draws, and every node has its own."""
    if not sigma:
        return None
    draw = random.Random(f"{seed}/{node}")
    return lambda: draw.lognormvariate(-sigma * sigma / 2, sigma)


def exponential(per_s: float, seed: int) -> Callable[[], float]:
    """Draws the times between the events of a Poisson process."""
    draw = random.Random(f"{seed}/arrivals")
    return lambda: draw.expovariate(per_s)
