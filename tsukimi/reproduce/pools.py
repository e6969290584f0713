"""Hit rates of one global pool, by the order of a trace alone: no time, no nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tsukimi.simulate.trace import TraceRow


def lru_hits(rows: Sequence[TraceRow], capacity_blocks: int, block_tokens: int) -> tuple[float, float]:
    """(share of blocks, share of tokens) found in a pool of so many blocks that evicts the least recently used one. A hit
    is part of the prompt's leading run. The partial last block of a prompt counts as a block of its own."""
    pool: OrderedDict[int, None] = OrderedDict()
    hit_blocks = blocks = hit_tokens = tokens = 0
    for row in rows:
        run = 0
        for hash_id in row.hash_ids:
            if hash_id not in pool:
                break
            run += 1
        hit_blocks += run
        blocks += len(row.hash_ids)
        hit_tokens += min(run * block_tokens, row.input_length)
        tokens += row.input_length
        for hash_id in row.hash_ids:
            pool[hash_id] = None
            pool.move_to_end(hash_id)
            if len(pool) > capacity_blocks:
                pool.popitem(last=False)
    return hit_blocks / blocks, hit_tokens / tokens
