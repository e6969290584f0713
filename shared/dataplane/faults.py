"""Damage on purpose, for tests: handed to an endpoint's constructor, never read from the environment."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class Fault(Struct, frozen=True):
    """What befalls one arriving slice."""

    drop: bool = False
    """As if it had never come."""
    corrupt: bool = False
    """Its first byte is flipped in memory before it is verified."""
    delay_s: float = 0.0
    """Its thread sleeps first."""
    cut: bool = False
    """The connection breaks here."""


Faults = Callable[[int], Fault | None]
"""Called with 0, 1, 2 ... for every slice that arrives at the endpoint."""
