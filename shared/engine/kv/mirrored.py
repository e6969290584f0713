"""KV pages on a device, mirrored in the shared memory that the data plane reads and writes.

What a step wrote goes to the mirror beside the computing: a layer's KV is on its way while the next ones are computed.
What landed in the mirror goes to the device the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shared.dataplane.memory.arena import Arena
from shared.engine.api import STAGING_BYTES
from shared.engine.attention.api import AttentionBatch
from shared.engine.kv.paged import DTYPES, arena_pages
from shared.engine.staging.lanes import Lane, lane_beside
from shared.engine.staging.stager import BUFFERS, Stager
from shared.engine.staging.written import whole_pages, written
from shared.protocol.errors import Invalid
from shared.protocol.ids import AttemptId
from shared.protocol.model import KVLayout

_MOST_READERS = 64
"""Attempts remembered per page; beyond it a page is copied once more than it had to be."""


class MirroredPages:
    """Implements paged.Pages.

    The mirror always holds everything: each step publishes what it wrote. So a page may be copied to the device at any
    moment between steps; it must be once per attempt, before the attempt first reads rows that it did not compute, as
    these may have landed in the mirror. Pages are given to another content only after all attempts on them have ended.
    """

    def __init__(
        self, arena: Arena, device: torch.device, staging_bytes: int = STAGING_BYTES, lane: Lane | None = None
    ) -> None:
        """Takes `staging_bytes` of host memory. Raises Invalid if that is too little."""
        layout = arena.layout
        self._block_tokens = layout.block_tokens
        size = (layout.layers, arena.pages + 1, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        pages = torch.zeros(size, dtype=DTYPES[layout.dtype], device=device)
        self.layers = list(pages.unbind(0))
        self.scrap: int | None = arena.pages
        self._stager = Stager(
            pages,
            arena_pages(arena),
            layout.kv_heads * layout.head_dim * layout.dtype_bytes,
            lane or lane_beside(device),
            _buffer_bytes(staging_bytes, layout),
        )
        self._readers: dict[int, set[AttemptId]] = {}

    def prepare(self, attempt: AttemptId, pages: Sequence[int], filled: int) -> None:
        new = [page for page in pages[:filled] if attempt not in self._readers.get(page, ())]
        if new:
            self._stager.load(self._stager.units(whole_pages(new, self._block_tokens)))
        for page in pages:
            readers = self._readers.setdefault(page, set())
            if len(readers) >= _MOST_READERS:
                readers.clear()
            readers.add(attempt)

    def outgoing(self, batch: AttentionBatch) -> MirroredStep:
        self._stager.forget()  # a step before that failed
        return MirroredStep(self._stager, batch, self._block_tokens)


class MirroredStep:
    """Implements paged.Outgoing."""

    def __init__(self, stager: Stager, batch: AttentionBatch, block_tokens: int) -> None:
        self._stager = stager
        self._units = stager.units(written(batch, block_tokens))

    def publish(self, layers: range, then: Callable[[], None] | None = None) -> None:
        self._stager.store(layers, self._units, then)

    def settle(self) -> None:
        self._stager.settle()


def _buffer_bytes(staging_bytes: int, layout: KVLayout) -> int:
    if staging_bytes < BUFFERS * layout.slice_bytes:
        raise Invalid(
            f"staging_bytes {staging_bytes} are too few: {BUFFERS} buffers must hold a layer of a block each, "
            f"{layout.slice_bytes} bytes",
            param="staging_bytes",
        )
    return staging_bytes // BUFFERS
