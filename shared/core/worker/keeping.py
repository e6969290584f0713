"""What becomes of the blocks of a sequence that has ended at a decode node: the next turn of its dialogue finds them."""

from __future__ import annotations

from shared.core.kv.block_keys import TOKEN_BYTES, extend_chain, pack_tokens, root_key
from shared.core.kv.pool import BlockPool
from shared.core.machine import Command
from shared.core.worker.config import WorkerConfig
from shared.core.worker.decode_sequence import DecodeSequence
from shared.core.worker.transfers import CommitPoolWrite, OpenPoolWrite, SendBlocks
from shared.protocol.ids import BlockKey


def keep_blocks(pool: BlockPool, sequence: DecodeSequence, worker: WorkerConfig) -> list[Command]:
    """Full blocks become findable here and go to the pool, if they are news to it; the other pages are free at once."""
    keys = (
        computed_keys(sequence, worker.namespace, worker.block_tokens) if worker.token_ids else sequence.keys
    )
    full = min(len(keys), sequence.computed // worker.block_tokens)
    if pool.keeps:
        new = slice(sequence.keyed, full)
        parent = keys[new.start - 1] if 0 < new.start < full else None
        pool.register_chain(sequence.pages[new], keys[new], parent)
    pool.unpin(sequence.pages[full:])
    del sequence.pages[full:]
    news = full > len(sequence.keys) or (sequence.local and full)
    if sequence.pool_node is None or not news:
        return []
    sequence.pool_open = sequence.pool_closing = True
    attempt, pages = sequence.attempt, tuple(sequence.pages)
    return [
        OpenPoolWrite(attempt, sequence.pool_node, worker.namespace, 0, keys[:full], pages),
        SendBlocks(attempt, 0, full, to_handoff=False),
        CommitPoolWrite(attempt),
    ]


def computed_keys(sequence: DecodeSequence, namespace: bytes, block_tokens: int) -> tuple[BlockKey, ...]:
    """Keys of all full blocks of prompt and answer whose KV is computed."""
    full = sequence.computed // block_tokens
    keys = sequence.keys
    if full <= len(keys):
        return keys[:full]
    parent = keys[-1] if keys else root_key(namespace)
    rest = pack_tokens((*sequence.request.tail_tokens, *sequence.answer.tokens))
    wanted_bytes = (full - len(keys)) * block_tokens * TOKEN_BYTES
    return keys + tuple(extend_chain(parent, rest[:wanted_bytes], block_tokens))
