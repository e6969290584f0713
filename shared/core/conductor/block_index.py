"""Which node holds which block: key -> holders, as a bitmask over nodes.

A prompt's reusable prefix on a node, or on several nodes together, is the contiguous run from block 0 that is held
there. Blocks behind a missing one do not count, because a block is useless without its ancestors.

The index is a hint: a wrong entry costs a recomputation, never a wrong answer. It is bounded: when it exceeds
`max_blocks`, the entries first stored longest ago are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, repeat
from operator import and_

from shared.protocol.ids import BlockKey, NodeId


class BlockIndex:
    """Holders of blocks. Each key is independent. Storing a known key or removing an unknown one is harmless."""

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        if max_blocks < 1:
            raise ValueError("an index holds at least one block")
        self.max_blocks = max_blocks
        self._holders: dict[BlockKey, int] = {}
        self._held: dict[NodeId, int] = {}
        """How many blocks each node holds."""
        self._bits: dict[NodeId, int] = {}
        self._names: dict[int, NodeId] = {}

    def __len__(self) -> int:
        """Number of blocks with at least one holder."""
        return len(self._holders)

    def held(self, node: NodeId) -> int:
        """How many blocks a node is known to hold."""
        return self._held.get(node, 0)

    # -- changes -----------------------------------------------------------------------------------------------------

    def add(self, node: NodeId) -> None:
        """Add a node that holds nothing yet. Harmless when repeated."""
        if node in self._held:
            return
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._held[node], self._bits[node], self._names[bit] = 0, bit, node

    def store(self, node: NodeId, keys: Iterable[BlockKey]) -> None:
        """The node holds these too. Ignored for an unknown node."""
        bit = self._bits.get(node)
        if bit is None:
            return
        holders, new = self._holders, 0
        for key in keys:
            if key in holders:
                mask = holders[key]
                if mask & bit:
                    continue
                holders[key] = mask | bit
            else:
                holders[key] = bit
            new += 1
        self._held[node] += new
        if len(holders) > self.max_blocks:
            self._shrink()

    def remove(self, node: NodeId, keys: Iterable[BlockKey]) -> None:
        """The node no longer holds these."""
        bit = self._bits.get(node)
        if bit is None:
            return
        holders, gone = self._holders, 0
        for key in keys:
            mask = holders.get(key, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del holders[key]
                else:
                    holders[key] = mask ^ bit
        self._held[node] -= gone

    def replace(self, node: NodeId, keys: Iterable[BlockKey]) -> None:
        """From now on the node holds exactly these."""
        new = dict.fromkeys(keys)
        self.remove(node, [key for key in self._keys(node) if key not in new])
        self.store(node, new)

    def drop(self, node: NodeId) -> None:
        """Forget a node and all it held."""
        self.remove(node, self._keys(node))
        if self._held.pop(node, None) is not None:
            del self._names[self._bits.pop(node)]

    def _keys(self, node: NodeId) -> list[BlockKey]:
        """All keys a node holds. Scans the whole index; needed only when a node leaves or sends a snapshot."""
        bit = self._bits.get(node, 0) if self._held.get(node) else 0
        return [key for key, mask in self._holders.items() if mask & bit] if bit else []

    # -- questions ---------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Who holds the leading blocks of a prompt. Valid until the index changes."""
        holders = self._holders
        if not keys or keys[0] not in holders:
            return Match([], self._bits, self._names)
        masks = list(map(holders.get, keys, repeat(0)))
        masks.append(0)
        del masks[masks.index(0) :]
        return Match(masks, self._bits, self._names)

    def check(self) -> None:
        for node, held in self._held.items():
            assert held == len(self._keys(node)), f"{node} does not hold the number of blocks counted"
        everybody = sum(self._names)
        assert all(mask and not mask & ~everybody for mask in self._holders.values()), (
            "no holder, or an unknown one"
        )
        assert len(self._holders) <= self.max_blocks, "more than max_blocks entries"
        assert self._bits.keys() == self._held.keys(), "a node has no bit"
        assert {bit: node for node, bit in self._bits.items()} == self._names, "two nodes share a bit"

    def _shrink(self) -> None:
        """Drop the oldest entries in a batch. Finding a dict's oldest entry for each one would take quadratic time."""
        excess = len(self._holders) - self.max_blocks + self.max_blocks // 16
        for key in list(islice(self._holders, excess)):
            mask = self._holders.pop(key)
            while mask:
                bit = mask & -mask
                self._held[self._names[bit]] -= 1
                mask ^= bit


class Match:
    """The holders of one prompt's leading blocks, up to the first block without a holder."""

    __slots__ = ("_bits", "_masks", "runs")

    def __init__(self, masks: list[int], bits: dict[NodeId, int], names: dict[int, NodeId]) -> None:
        self._masks = masks
        self._bits = bits
        self.runs = _runs(masks, names)
        """Length of the leading run of every node that holds the first block."""

    def __len__(self) -> int:
        """How many leading blocks have at least one holder each."""
        return len(self._masks)

    def run(self, node: NodeId) -> int:
        """Length of the leading run that a node holds."""
        return self.runs.get(node, 0)

    def run_of_any(self, nodes: Sequence[NodeId]) -> int:
        """Length of the leading run in which each block is held by at least one of the nodes."""
        runs, run = self.runs, 0
        if not runs:
            return 0
        for node in nodes:
            if node in runs and runs[node] > run:
                run = runs[node]
        if not run or run == len(self._masks):
            return run
        group = 0
        for node in nodes:
            group |= self._bits.get(node, 0)
        return self._end(group, run)

    def span(self, node: NodeId, start: int) -> int:
        """End (exclusive) of the run that a node holds from block `start` on; `start` if it lacks that block."""
        return self._end(self._bits.get(node, 0), max(start, self.runs.get(node, 0)))

    def _end(self, group: int, at: int) -> int:
        masks = self._masks
        while at < len(masks) and masks[at] & group:
            at += 1
        return at


def _runs(masks: list[int], names: dict[int, NodeId]) -> dict[NodeId, int]:
    """Node -> length of its leading run. A running AND over the masks only loses bits, so bisection finds each place
    where bits are lost."""
    runs: dict[NodeId, int] = {}
    if not masks:
        return runs
    common = list(accumulate(masks, and_))
    common.append(0)
    at, here = 0, common[0]
    while here:
        at = _end_of(common, here, at)
        lost = here & ~common[at]
        here = common[at]
        while lost:
            bit = lost & -lost
            runs[names[bit]] = at
            lost ^= bit
    return runs


def _end_of(common: list[int], value: int, start: int) -> int:
    """First index from `start` on at which `common` is not `value`. The last item never is."""
    low, high = start, len(common) - 1
    while low < high:
        middle = (low + high) // 2
        if common[middle] == value:
            low = middle + 1
        else:
            high = middle
    return low
