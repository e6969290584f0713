"""How fast links are, from the fetches that nodes have timed; until then as configured."""

from __future__ import annotations

from shared.core.conductor.node_registry import NodeState
from shared.core.costs.fit import LinearFit
from shared.core.costs.links import Links
from shared.protocol.cluster import LinkTotals, NodeLoad
from shared.protocol.ids import Incarnation, NodeId

Life = tuple[NodeId, Incarnation]

FASTEST = 1e3
"""No link is taken to be so many times as fast as configured, or faster: a fit may find that size does not matter."""


class MeasuredLinks:
    """Two kinds of link: between hosts, and within one. Each has one fit for the whole cluster, so that a node that has
    just come profits from what others measured. Reports may be lost: they tell totals."""

    def __init__(self, prior: Links) -> None:
        self.now = prior
        """The links as known now."""
        near_fixed_s = prior.fixed_s if prior.shm_fixed_s is None else prior.shm_fixed_s
        self._far = _Kind(prior.fixed_s, prior.nic_bytes_s)
        self._near = _Kind(near_fixed_s, prior.shm_bytes_s)
        self._told: dict[Life, tuple[LinkTotals, LinkTotals]] = {}

    def reported(self, node_state: NodeState, load: NodeLoad) -> None:
        """A registered node's newest load."""
        near, far = load.fetched_near, load.fetched_far
        if not (near.fetches or far.fetches) or node_state.info.model is None:
            return
        life = (load.node, load.incarnation)
        before_near, before_far = self._told.get(life, (LinkTotals(), LinkTotals()))
        if near.fetches == before_near.fetches and far.fetches == before_far.fetches:
            return
        self._told[life] = near, far
        block_bytes = node_state.info.model.layout.block_bytes
        self._near.timed(before_near, near, block_bytes)
        self._far.timed(before_far, far, block_bytes)
        self.now = Links(
            nic_bytes_s=self._far.bytes_s,
            shm_bytes_s=self._near.bytes_s,
            fixed_s=self._far.fixed_s,
            shm_fixed_s=self._near.fixed_s,
        )

    def keep(self, lives: set[Life]) -> None:
        """Only these are there. What was learnt from others stays."""
        self._told = {life: told for life, told in self._told.items() if life in lives}


class _Kind:
    """One kind of link: seconds = fixed_s * fetches + bytes / bytes_s."""

    def __init__(self, fixed_s: float, bytes_s: float) -> None:
        self.fixed_s = fixed_s
        self.bytes_s = bytes_s
        self._most_bytes_s = bytes_s * FASTEST
        self._fit = LinearFit((fixed_s, 1.0 / bytes_s))

    def timed(self, before: LinkTotals, after: LinkTotals, block_bytes: int) -> None:
        """What a node has fetched between two reports is one sample."""
        fetches = after.fetches - before.fetches
        if fetches <= 0:
            return
        size_bytes = (after.blocks - before.blocks) * block_bytes
        self._fit.observe((float(fetches), float(size_bytes)), after.seconds - before.seconds)
        self.fixed_s, byte_s = self._fit.weights()
        self.bytes_s = 1.0 / max(byte_s, 1.0 / self._most_bytes_s)
