"""What a cache node's machine is told about itself."""

from __future__ import annotations

from msgspec import Struct


class CacheConfig(Struct, frozen=True, kw_only=True):
    pages: int = 0
    """0: told later, by ArenaLaidOut."""
    eviction: str = "lru"
    put_lease_s: float = 60.0
    """A put to which nothing arrives for so long is over."""
    read_lease_s: float = 30.0
    """A read that takes longer finds its blocks gone, maybe."""
    put_share: float = 0.5
    """Most of the pages that open puts may hold."""
    read_share: float = 0.75
    """Most of the pages that open reads may pin."""
    publish_keys: int = 16384
    """Most stored, and most removed, keys in one PublishBlocks."""
