"""What a cache node can be told."""

from __future__ import annotations

from shared.io.config import BaseConfig, Count, PositiveS, Share


class CacheNodeConfig(BaseConfig, frozen=True, kw_only=True):
    pool_bytes: Count = 2 << 30
    """Memory for blocks; all of it is taken at start."""
    eviction: str = "lru"
    """Which block goes when room is needed: lru, fifo, or `module:Class` of your own."""
    put_lease_s: PositiveS = 60.0
    """A writer from whom nothing comes for so long has lost its put."""
    read_lease_s: PositiveS = 30.0
    """A reader that takes longer may find blocks gone."""
    put_share: Share = 0.5
    """Most of the pool that unfinished puts may hold."""
    read_share: Share = 0.75
    """Most of the pool that running reads may pin."""
    shm: bool = True
    """Serve processes of the same host by shared memory."""
