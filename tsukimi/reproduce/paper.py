"""What the papers say, each figure and table once.

FAST'25: "Mooncake: Trading More Storage for Less Computation". arXiv: 2407.00079, version 3.
"""

from __future__ import annotations

FIG_14: dict[int, tuple[float, float]] = {
    8: (1.002, 0.135),
    16: (2.056, 0.226),
    32: (4.479, 0.406),
    64: (10.587, 0.881),
    128: (27.514, 2.329),
}
"""FAST'25, Fig 14: seconds of prefill with 0 % and with 95 % of the prompt cached, by thousands of 1024 tokens."""

FIG_9: dict[int, float] = {
    1_000_000: 0.087,
    2_000_000: 0.120,
    5_000_000: 0.247,
    10_000_000: 0.326,
    50_000_000: 0.398,
}
"""FAST'25, Fig 9, conversation: hit rate by capacity in tokens, one global LRU."""
FIG_9_BLOCK_TOKENS = 256
"""The papers' store has smaller blocks than the published traces."""

FIG_5: dict[str, float] = {
    "random": 19.65,
    "load_balance": 5.27,
    "cache_aware": 3.58,
    "kvcache_centric": 3.07,
}
"""FAST'25, Fig 5: mean TTFT in seconds by policy, conversation, 16 nodes. Their split is not stated."""

TABLE_1: dict[str, dict[int, float]] = {
    "lru": {1_000: 0.30, 10_000: 0.40, 30_000: 0.48, 50_000: 0.50, 100_000: 0.51},
}
"""arXiv, Table 1: hit rate by capacity in blocks, on a trace that is not the conversation trace."""

TABLE_3: dict[str, int] = {"baseline": 4183, "early": 3771, "predictive": 3589}
"""arXiv, Table 3: requests refused by 8 prefill and 8 decode nodes at twice the speed of 23,000 real requests."""

TTFT_SLO_S = 30.0
TBT_SLO_S = 0.1
"""Both papers' objectives for real workloads."""
