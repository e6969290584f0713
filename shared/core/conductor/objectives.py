"""The latency objectives, and how far predictions are trusted when requests are refused to meet them."""

from __future__ import annotations

from msgspec import Struct


class Objectives(Struct, frozen=True):
    """Latency objectives in seconds; 0 means none."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0
    min_samples: int = 8
    """A fitted time model with fewer measurements counts as a guess. A given one never does."""
    idle_refusals: float = 0.5
    """Largest share that fitted time models may refuse of the last `window` requests that arrived while nodes were
    idle."""
    window: int = 20
