"""What may be varied from one simulated run to the next."""

from __future__ import annotations

from msgspec import Struct


class SimulationConfig(Struct, frozen=True, kw_only=True):
    policy: str = "kvcache_centric"
    decode_policy: str = "least_tbt"
    prefill: int = 8
    """Prefill nodes, each on its own host with a cache node."""
    decode: int = 8
    balancing_threshold: float = 1.0
    seed: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    kv_tokens: int = 1_000_000
    """KV memory of each prefill and decode node, in tokens."""
    keep_blocks: bool = False
    """Whether prefill and decode nodes keep blocks in their own memory besides the pool. In the papers they do not."""
    pool_tokens: int = 3_000_000
    """Memory of each cache node, in tokens."""
    chunk_tokens: int = 131_072
    """Most prompt tokens of one prefill step."""
    max_prefills: int = 1
    """Prompts that a prefill node loads and computes at a time."""
    inline_tokens: int = 0
    """Most uncached prompt tokens that a decode node prefills itself."""
    cost: str = "llama2-70b-8xa800"
    nic_bytes_s: float = 87e9
    shm_bytes_s: float = 128e9
    message_s: float = 0.001
    """Seconds that a control message takes."""
