"""Which node holds which block: key -> holders, as a bitmask over slots.

A prompt's reusable prefix on a node, or on the nodes of a host taken together, is the contiguous run from block 0
that is held there: nothing beyond a hole counts, and as keys are chained a block without its parents never does.

Soft state, a hint: a wrong entry costs a recomputation, never a wrong answer. Bounded: over `max_blocks` the
entries that were first stored longest ago go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, repeat
from operator import and_

from shared.protocol.ids import BlockKey, NodeId


class BlockIndex:
    """Holders of blocks. Keys stand each on its own: storing a known one or removing an unknown one is harmless."""

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        if max_blocks < 1:
            raise ValueError("an index holds at least one block")
        self.max_blocks = max_blocks
        self._holders: dict[BlockKey, int] = {}
        self._held: dict[NodeId, set[BlockKey]] = {}
        self._nodes = _Slots()
        self._hosts = _Slots()
        self._host_of: dict[NodeId, str] = {}
        self._host_masks = _HostMasks(self._nodes, self._hosts, self._host_of)

    def __len__(self) -> int:
        """Blocks that someone holds."""
        return len(self._holders)

    def held(self, node: NodeId) -> int:
        """How many blocks a node is known to hold."""
        return len(self._held.get(node, ()))

    # -- changes -----------------------------------------------------------------------------------------------

    def add(self, node: NodeId, host: str) -> None:
        """Make a node known, holding nothing yet, on a host. Harmless when repeated; the host may change."""
        if self._host_of.get(node) == host:
            return
        if node in self._held:
            self._leave_host(node)
        self._held.setdefault(node, set())
        self._nodes.bit(node)
        self._hosts.bit(host)
        self._host_of[node] = host

    def store(self, node: NodeId, keys: Iterable[BlockKey]) -> None:
        """The node holds these too. Ignored for an unknown node."""
        held = self._held.get(node)
        if held is None:
            return
        bit, holders = self._nodes.bits[node], self._holders
        for key in keys:
            if key not in held:
                held.add(key)
                holders[key] = holders.get(key, 0) | bit
        if len(holders) > self.max_blocks:
            self._shrink()

    def remove(self, node: NodeId, keys: Iterable[BlockKey]) -> None:
        """The node no longer holds these."""
        held = self._held.get(node)
        if held is None:
            return
        bit, holders = self._nodes.bits[node], self._holders
        for key in keys:
            if key in held:
                held.remove(key)
                if left := holders[key] & ~bit:
                    holders[key] = left
                else:
                    del holders[key]

    def replace(self, node: NodeId, keys: Iterable[BlockKey]) -> None:
        """From now on the node holds exactly these."""
        new = set(keys)
        self.remove(node, self._held.get(node, set()) - new)
        self.store(node, new)

    def drop(self, node: NodeId) -> None:
        """Forget a node and all it held."""
        self.remove(node, list(self._held.get(node, ())))
        if self._held.pop(node, None) is not None:
            self._nodes.free(node)
            self._leave_host(node)

    # -- questions ---------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Who holds the leading blocks of a prompt. Valid until the index changes."""
        holders = self._holders
        if not keys or keys[0] not in holders:
            return Match([], self._nodes.bits, self._hosts.bits, self._host_masks)
        masks = list(map(holders.get, keys, repeat(0)))
        masks.append(0)
        del masks[masks.index(0) :]
        return Match(masks, self._nodes.bits, self._hosts.bits, self._host_masks)

    def check(self) -> None:
        counted: dict[BlockKey, int] = {}
        for node, held in self._held.items():
            for key in held:
                counted[key] = counted.get(key, 0) | self._nodes.bits[node]
        assert counted == self._holders, "holders by key and keys by holder disagree"
        assert len(self._holders) <= self.max_blocks, "over the bound"
        assert self._nodes.bits.keys() == self._held.keys() == self._host_of.keys(), "nodes disagree"
        assert self._hosts.bits.keys() == set(self._host_of.values()), "hosts disagree"
        self._nodes.check()
        self._hosts.check()

    def _leave_host(self, node: NodeId) -> None:
        host = self._host_of.pop(node)
        if host not in self._host_of.values():
            self._hosts.free(host)
        self._host_masks.clear()

    def _shrink(self) -> None:
        """A batch at a time: finding the oldest entry of a dict anew for each would take quadratic time."""
        excess = len(self._holders) - self.max_blocks + self.max_blocks // 16
        for key in list(islice(self._holders, excess)):
            for node in self._nodes.names_in(self._holders.pop(key)):
                self._held[node].discard(key)


class Match:
    """The holders of one prompt's leading blocks, as far as anyone holds them."""

    def __init__(
        self, masks: list[int], nodes: dict[NodeId, int], hosts: dict[str, int], host_masks: _HostMasks
    ) -> None:
        self._masks = masks
        self._nodes = nodes
        self._hosts = hosts
        self._host_masks = host_masks
        self._node_runs: dict[int, int] | None = None
        self._host_runs: dict[int, int] | None = None

    def run(self, node: NodeId) -> int:
        """Length of the leading run that a node holds."""
        if self._node_runs is None:
            self._node_runs = _runs(self._masks)
        return self._node_runs.get(self._nodes.get(node, 0), 0)

    def host_run(self, host: str) -> int:
        """Length of the leading run whose every block is held by one node of the host or another."""
        if self._host_runs is None:
            self._host_runs = _runs(list(map(self._host_masks.__getitem__, self._masks)))
        return self._host_runs.get(self._hosts.get(host, 0), 0)

    def span(self, node: NodeId, start: int) -> int:
        """End of the contiguous run that a node holds from block `start` on; `start` if it does not hold that."""
        bit = self._nodes.get(node, 0)
        for i in range(start, len(self._masks)):
            if not self._masks[i] & bit:
                return i
        return max(start, len(self._masks))


class _Slots:
    """Names interned as single bits."""

    def __init__(self) -> None:
        self.bits: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def bit(self, name: str) -> int:
        if name not in self.bits:
            bit = 1
            while bit in self._names:
                bit <<= 1
            self.bits[name], self._names[bit] = bit, name
        return self.bits[name]

    def free(self, name: str) -> None:
        del self._names[self.bits.pop(name)]

    def names_in(self, mask: int) -> list[str]:
        names = []
        while mask:
            bit = mask & -mask
            names.append(self._names[bit])
            mask ^= bit
        return names

    def check(self) -> None:
        assert {bit: name for name, bit in self.bits.items()} == self._names, "slots and names disagree"


class _HostMasks(dict[int, int]):
    """Mask over nodes -> mask over their hosts, remembered: few different ones occur."""

    def __init__(self, nodes: _Slots, hosts: _Slots, host_of: dict[NodeId, str]) -> None:
        self._nodes, self._hosts, self._host_of = nodes, hosts, host_of

    def __missing__(self, mask: int) -> int:
        hosts = 0
        for node in self._nodes.names_in(mask):
            hosts |= self._hosts.bits[self._host_of[node]]
        if len(self) > 100_000:
            self.clear()
        self[mask] = hosts
        return hosts


def _runs(masks: list[int]) -> dict[int, int]:
    """Bit -> length of its leading run. Masks and-ed from the front only ever lose bits, so that each place where
    some go is found by bisection."""
    runs: dict[int, int] = {}
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
            runs[bit] = at
            lost ^= bit
    return runs


def _end_of(common: list[int], value: int, start: int) -> int:
    """First index after `start` where it is no longer `value`; the last item never is."""
    low, high = start, len(common) - 1
    while low < high:
        middle = (low + high) // 2
        if common[middle] == value:
            low = middle + 1
        else:
            high = middle
    return low
