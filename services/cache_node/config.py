"""What a cache node can be told."""

from __future__ import annotations

from shared.io.config import BaseConfig, Count, PositiveS, Share


class CacheNodeConfig(BaseConfig, frozen=True, kw_only=True):
    pool_bytes: Count = 2 << 30
    """Memory for blocks; all of it is taken at start."""
    eviction: str = "lru"
    """Which block is evicted when room is needed: lru, fifo, or your own `module:Class`."""
    put_lease_s: PositiveS = 60.0
    """A put ends when its writer has sent nothing for this many seconds."""
    read_lease_s: PositiveS = 30.0
    """Seconds for which a read holds its blocks; a slower reader may find them gone."""
    put_share: Share = 0.5
    """Largest share of the pool that unfinished puts may hold."""
    read_share: Share = 0.75
    """Largest share of the pool that running reads may pin."""
    shm: bool = True
    """Serve processes of the same host through shared memory."""
    transports: str = ""
    """More ways to move KV, preferred to shared memory and TCP: `module:Class` of your own, separated by commas."""
