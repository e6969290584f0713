"""What a cache node's machine is told about itself."""

from __future__ import annotations

from msgspec import Struct


class CacheConfig(Struct, frozen=True, kw_only=True):
    pages: int = 0
    """Pages in the pool. 0: ArenaLaidOut sets the number later."""
    eviction: str = "lru"
    put_lease_s: float = 60.0
    """Seconds without new data after which a put expires."""
    read_lease_s: float = 30.0
    """Seconds a read holds its blocks. After that they may be evicted under a slower reader."""
    put_share: float = 0.5
    """Largest share of all pages that open puts may hold together."""
    read_share: float = 0.75
    """Largest number of pins that open reads may hold together, as a share of all pages."""
    publish_keys: int = 16384
    """Largest number of stored keys, and of removed keys, in one PublishBlocks."""
