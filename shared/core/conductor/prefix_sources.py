"""Where a prompt's prefix is pulled from, and which cache node gets its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.conductor.block_index import Match
from shared.core.conductor.node_registry import NodeState
from shared.core.conductor.prediction.link_queues import LinkQueues
from shared.protocol.requests import BlockSource


def best_cache(
    match: Match, caches: Sequence[NodeState], senders: LinkQueues, now: float
) -> tuple[int, NodeState | None]:
    """The longest leading run any cache node holds, in blocks, and its holder. Among equals, the one that has the least
    to send."""
    best, holder, runs = 0, None, match.runs
    for cache in caches if runs else ():
        run = runs.get(cache.node, 0)
        if run > best:
            best, holder = run, cache
        elif (
            run == best
            and holder is not None
            and senders.wait_s(cache.host, now) < senders.wait_s(holder.host, now)
        ):
            holder = cache
    return best, holder


def sources_for(
    match: Match,
    prefiller: NodeState,
    near: Sequence[NodeState],
    far: Sequence[NodeState],
    cached_blocks: int,
) -> tuple[BlockSource, ...]:
    """Runs to pull so that the first `cached_blocks` blocks are covered, up to the first block that nobody holds.

    Each run comes from a cache node on the prefill node's host (`near`) if one holds it. Otherwise it needs no source if
    the prefill node has it in memory. Otherwise it comes from a cache node on another host (`far`).
    """
    sources: list[BlockSource] = []
    at = 0
    while at < cached_blocks:
        end, holder = _furthest(match, near, at)
        own_end = match.span(prefiller.node, at) if holder is None else at
        if holder is None and own_end == at:
            end, holder = _furthest(match, far, at)
        end = min(max(end, own_end), cached_blocks)
        if end == at:
            break
        if holder is not None:
            sources.append(BlockSource(holder=holder.ref, first_block=at, blocks=end - at))
        at = end
    return tuple(sources)


def pool_for(match: Match, near: Sequence[NodeState], caches: Sequence[NodeState]) -> NodeState | None:
    """The cache node that gets the prompt's blocks: one in `near`, or else any. Among several, the one with the longest
    leading run of the prompt, so that chains stay together; among equals, the least busy."""
    if len(near) == 1:
        return near[0]
    return min(near or caches, key=lambda c: (-match.run(c.node), *_busy(c)), default=None)


def _furthest(match: Match, caches: Sequence[NodeState], at: int) -> tuple[int, NodeState | None]:
    end, holder = at, None
    for cache in caches:
        reach = match.runs.get(cache.node, 0) if not at else match.span(cache.node, at)
        if reach > end or (reach == end > at and holder is not None and _busy(cache) < _busy(holder)):
            end, holder = reach, cache
    return end, holder


def _busy(cache: NodeState) -> tuple[int, int]:
    load = cache.load
    return (load.running, load.kv_blocks_held + load.kv_blocks_cached) if load else (0, 0)
