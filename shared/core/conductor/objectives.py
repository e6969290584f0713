"""What users are promised, and how far predictions are trusted in keeping it."""

from __future__ import annotations

from msgspec import Struct


class Objectives(Struct, frozen=True):
    """Latency objectives; 0: none."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0
    min_samples: int = 8
    """A fitted time model with fewer measurements is a guess; a given one never is."""
    idle_refusals: float = 0.5
    """Most of what arrives while nodes are idle that fitted time models may refuse, as a share of the last
    `window`."""
    window: int = 20
