"""Which cached page goes first when room is needed. A policy only ranks; the pool keeps parents behind their children."""

from __future__ import annotations

from typing import Protocol


class PageUse:
    """What a policy may know about a cached page. Times are counts of pool operations, not seconds."""

    __slots__ = ("stored_at", "used_at", "uses")

    def __init__(self, stored_at: int = 0, used_at: int = 0, uses: int = 0) -> None:
        self.stored_at = stored_at
        self.used_at = used_at
        self.uses = uses
        """How many sequences have held it."""


class EvictionPolicy(Protocol):
    """Pure and total: the rank depends on `use` alone."""

    @property
    def name(self) -> str: ...

    def rank(self, use: PageUse) -> tuple[int, ...]:
        """The lowest rank is evicted first. Asked when a page becomes evictable, and kept until it is used again."""
        ...


class Lru:
    """Least recently released first."""

    name = "lru"

    def rank(self, use: PageUse) -> tuple[int, ...]:
        return (use.used_at,)


class Fifo:
    """First stored first, however often it was used since."""

    name = "fifo"

    def rank(self, use: PageUse) -> tuple[int, ...]:
        return (use.stored_at,)


POLICIES: dict[str, EvictionPolicy] = {policy.name: policy for policy in (Lru(), Fifo())}
"""By name. Shells register a user's own class as `module:Class` (io.plugins.classes)."""
