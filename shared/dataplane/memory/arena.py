"""KVCache blocks laid out in shared memory: the PageStore of engines and of cache nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from shared.dataplane.memory.anonymous import Memory, Progress
from shared.protocol.errors import Invalid, TooLarge
from shared.protocol.model import KVLayout

Order = Literal["layer", "page"]
"""layer: `[layers][pages][slice]`, one contiguous tensor a layer, for engines.
page: `[pages][layers][slice]`, one contiguous run a block, for pools."""


class Arena:
    """Pages of `layout` over one Memory. Contents are the owner's to synchronise; the arithmetic is
    stateless.

    Extents (offset, length) name bytes of the memory: what transports send, receive and pass to another
    process.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        order: Order = "layer",
        *,
        memory: Memory | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Allocates and touches its own memory, or lays itself over `memory` (then still the caller's to
        close). Raises TooLarge when the host, or the memory given, has no room for it."""
        needed = pages * layout.block_bytes
        if pages <= 0 or needed <= 0:
            raise Invalid(f"an arena of {pages} pages of {layout.block_bytes} bytes makes no sense")
        if memory is not None and needed > memory.size_bytes:
            raise TooLarge(f"{pages} pages need {needed} bytes, but the memory given has {memory.size_bytes}")
        self.layout = layout
        self.pages = pages
        self.order: Order = order
        self.size_bytes = needed
        self._owns_memory = memory is None
        self.memory = memory if memory is not None else Memory(needed, progress)
        self._slice_bytes = layout.slice_bytes
        self._page_stride = layout.block_bytes if order == "page" else layout.slice_bytes
        self._layer_stride = layout.slice_bytes if order == "page" else layout.slice_bytes * pages

    @property
    def fd(self) -> int:
        return self.memory.fd

    def offset(self, page: int, layer: int) -> int:
        """Where one layer of one page begins in the memory. Raises IndexError outside the arena."""
        if not (0 <= page < self.pages and 0 <= layer < self.layout.layers):
            raise IndexError(
                f"page {page}, layer {layer} outside {self.pages} pages of {self.layout.layers} layers"
            )
        return page * self._page_stride + layer * self._layer_stride

    def slice(self, page: int, layer: int) -> memoryview:
        """Writable bytes of one layer of one page, `layout.slice_bytes` long, contiguous."""
        start = self.offset(page, layer)
        return self.memory.view[start : start + self._slice_bytes]

    def layer_buffer(self, layer: int) -> memoryview:
        """All pages of one layer, contiguous: `[pages, 2, block_tokens, kv_heads, head_dim]`. Layer order
        only."""
        if self.order != "layer":
            raise Invalid("a page-ordered arena has no contiguous layers")
        start = self.offset(0, layer)
        return self.memory.view[start : start + self.pages * self._slice_bytes]

    def extents(self, slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """(offset, length) of the (page, layer) slices in the order given, neighbours in memory merged."""
        size = self._slice_bytes
        merged: list[tuple[int, int]] = []
        end = -1
        for page, layer in slices:
            start = self.offset(page, layer)
            if start == end:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
            end = start + size
        return merged

    def block_slices(self, pages: Iterable[int]) -> Iterable[tuple[int, int]]:
        """(page, layer) of whole blocks, in wire order."""
        layers = range(self.layout.layers)
        return ((page, layer) for page in pages for layer in layers)

    def close(self) -> None:
        """Idempotent. See Memory.close for views still held."""
        if self._owns_memory:
            self.memory.close()
