"""The reusable prefix of a prompt: from the node's own memory, then from where the conductor says it is.

Only ever a contiguous run from block 0, and never the whole prompt: its last token is always computed.
"""

from __future__ import annotations

from shared.core.kv.block_keys import reusable_blocks
from shared.core.kv.pool import BlockPool
from shared.core.worker.sequence import SequenceState
from shared.core.worker.transfers import FetchBlocks
from shared.protocol.requests import BlockSource

LEAST_WAIT_S = 1e-3
"""A source whose blocks are overdue is still one that has to be waited for."""


def reusable(sequence: SequenceState, block_tokens: int) -> int:
    keys, most = len(sequence.keys), reusable_blocks(sequence.prompt_tokens, block_tokens)
    return most if most < keys else keys


def take_pages(pool: BlockPool, sequence: SequenceState, blocks: int, block_tokens: int) -> bool:
    """Give the sequence `blocks` pages, the first of them with what own memory has of its prefix. False (and no change)
    if that many can't be had now."""
    matched = pool.match(sequence.keys[: reusable(sequence, block_tokens)]) if pool.keeps else []
    fresh = pool.allocate(blocks - len(matched))
    if fresh is None:
        pool.unpin(matched)
        return False
    sequence.pages = matched + fresh
    sequence.keyed = len(matched)
    sequence.computed = len(matched) * block_tokens
    return True


def match_more(pool: BlockPool, sequence: SequenceState, block_tokens: int) -> bool:
    """Before anything is computed or streamed: use what neighbours with the same prefix have computed since. Whether that
    was anything."""
    if not pool.keeps:
        return False
    have = sequence.computed // block_tokens
    keys = sequence.keys[have : reusable(sequence, block_tokens)]
    matched = pool.match(keys)
    if not matched:
        return False
    end = have + len(matched)
    pool.unpin(sequence.pages[have:end])
    sequence.pages[have:end] = matched
    sequence.page_table = ()
    sequence.keyed = end
    sequence.computed = end * block_tokens
    return True


def next_fetch(
    sequence: SequenceState, namespace: bytes, block_tokens: int, now: float
) -> FetchBlocks | None:
    """The next source that continues the run; None when none does. A source that failed is not asked again, but a later
    one that covers the same blocks is."""
    have = sequence.computed // block_tokens
    most = reusable(sequence, block_tokens)
    while have < most and sequence.sources_tried < len(sequence.sources):
        source = sequence.sources[sequence.sources_tried]
        sequence.sources_tried += 1
        end = min(source.first_block + source.blocks, most)
        if source.first_block <= have < end:
            sequence.fetches += 1
            ready_in_s = source.ready_in_s
            if ready_in_s > 0.0:
                ready_in_s = max(LEAST_WAIT_S, ready_in_s - (now - sequence.came_s))
            return FetchBlocks(
                sequence.attempt,
                BlockSource(source.holder, have, end - have, ready_in_s),
                namespace,
                sequence.keys[have:end],
                tuple(sequence.pages[have:end]),
                sequence.fetches,
            )
    return None


def expected_prefix(pool: BlockPool, sequence: SequenceState, block_tokens: int) -> int:
    """Tokens that will probably not have to be computed."""
    most = reusable(sequence, block_tokens)
    have = pool.peek(sequence.keys[:most]) if pool.keeps else 0
    for source in sequence.sources:
        if source.first_block <= have:
            have = max(have, min(most, source.first_block + source.blocks))
    return have * block_tokens


def key_blocks(pool: BlockPool, sequence: SequenceState, block_tokens: int) -> None:
    """Make the prompt's blocks that became complete findable."""
    if not pool.keeps:
        return
    keys, pages = sequence.keys, sequence.pages
    full = min(sequence.computed // block_tokens, len(keys))
    if full > sequence.keyed:
        new = slice(sequence.keyed, full)
        pool.register_chain(pages[new], keys[new], keys[new.start - 1] if new.start else None)
        sequence.keyed = full
