"""What placement and decode policies may be configured with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class PolicyOptions:
    """The conductor's options that a policy may want; each takes what it knows."""

    balancing_threshold: float = 1.0
    seed: int = 0
    patience: float = 1.5
    """A prompt waits for a prefill under way that computes its prefix, instead of computing it again, if its first token
    comes at most so many times as late."""
