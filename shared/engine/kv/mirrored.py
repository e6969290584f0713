"""KV pages on a device, mirrored in the shared memory that the data plane reads and writes.

A layer's KV is copied to the mirror while the next layers are computed. KV that the data plane has received into the
mirror is copied to the device in the same way, without blocking.
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
"""How many attempts are remembered per page. When more use it, they are forgotten, and the page may be copied once more
than necessary."""


class MirroredPages:
    """Implements paged.Pages.

    The mirror is always complete, since each step publishes what it wrote. So a page may be copied to the device at any
    time between steps. It must be copied once per attempt, before the attempt first reads rows that it did not compute:
    these may have arrived in the mirror only. A page gets new content only after all attempts that use it have ended.
    """

    def __init__(
        self, arena: Arena, device: torch.device, staging_bytes: int = STAGING_BYTES, lane: Lane | None = None
    ) -> None:
        """Allocates `staging_bytes` of host memory for copies. Raises Invalid if that is too little."""
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
        self._stager.forget()  # copies left by an earlier step that failed
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
            f"staging_bytes {staging_bytes} is too small: each of {BUFFERS} buffers must hold a layer of a block, "
            f"{layout.slice_bytes} bytes",
            param="staging_bytes",
        )
    return staging_bytes // BUFFERS
