"""A tier below DRAM: a pool backend that also keeps its blocks in something slower, and brings them back when asked.

A cache node's endpoint takes it by `endpoint.serve_pool(TieredPool(pool, arena, tier))`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

from shared.dataplane.memory.arena import Arena
from shared.dataplane.pool_backend import PoolBackend, PutGrant, ReadGrant
from shared.dataplane.wire.checksums import block_checksum, slice_checksums
from shared.protocol.ids import BlockKey, LandingId

Block = tuple[bytes, BlockKey]
"""(namespace, key)."""


class SlowTier(Protocol):
    async def read(self, block: Block) -> bytes | None: ...

    def write(self, block: Block, content: bytes) -> None: ...


class TieredPool:
    """Implements dataplane.api.PoolBackend over another one. Reads may wait for the tier; nobody else waits for them."""

    def __init__(self, memory: PoolBackend, arena: Arena, tier: SlowTier) -> None:
        self._memory, self._arena, self._tier = memory, arena, tier
        self._puts: dict[LandingId, dict[int, tuple[Block, int]]] = {}

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> PutGrant:
        grant = self._memory.open_put(namespace, keys)
        assert isinstance(grant, PutGrant)
        rooms = zip(grant.wanted, grant.pages, strict=True)
        self._puts[grant.landing] = {i: ((namespace, keys[i]), page) for i, page in rooms}
        return grant

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        for i, (block, page) in self._puts.pop(landing, {}).items():
            if i in checksums:
                slices = self._arena.block_slices([page])
                self._tier.write(block, b"".join(bytes(self._arena.slice(*one)) for one in slices))
        return self._memory.commit_put(landing, checksums)

    def abort_put(self, landing: LandingId) -> None:
        self._puts.pop(landing, None)
        self._memory.abort_put(landing)

    async def open_read(
        self, namespace: bytes, keys: Sequence[BlockKey], patience_s: float = 0.0
    ) -> ReadGrant:
        """Bring back what memory lacks of the run, then grant it from memory."""
        contents = []
        for key in keys:
            content = await self._tier.read((namespace, key))
            if content is None:
                break
            contents.append(content)
        self._bring_back(namespace, keys[: len(contents)], contents)
        grant = self._memory.open_read(namespace, keys, patience_s)
        return await grant if inspect.isawaitable(grant) else grant

    def close_read(self, lease: int) -> None:
        self._memory.close_read(lease)

    def _bring_back(self, namespace: bytes, keys: Sequence[BlockKey], contents: Sequence[bytes]) -> None:
        grant = self._memory.open_put(namespace, keys)
        assert isinstance(grant, PutGrant)
        size, checksums = self._arena.layout.slice_bytes, {}
        for i, page in zip(grant.wanted, grant.pages, strict=True):
            slices = list(self._arena.block_slices([page]))
            for layer, one in enumerate(slices):
                self._arena.slice(*one)[:] = contents[i][layer * size : (layer + 1) * size]
            checksums[i] = block_checksum(slice_checksums(self._arena, slices))
        self._memory.commit_put(grant.landing, checksums)
