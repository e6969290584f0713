"""Memory for packed weights. It uses huge pages if the system has them, since every step reads all weights."""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch

CHUNK_BYTES = 256 << 20
"""Size of a mapping. Its unused parts take no physical memory."""
ALIGN_BYTES = 64


class Store:
    """Allocates tensors next to each other in large chunks. A chunk is freed when the last of its tensors is freed."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, filled with zeros and aligned to ALIGN_BYTES."""
        count = prod(shape)
        size = -(-count * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        if self._chunk is None or self._used_bytes + size > len(self._chunk):
            self._chunk, self._used_bytes = _mapped(max(size, CHUNK_BYTES)), 0
        taken = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used_bytes)
        self._used_bytes += size
        return taken.view(shape)


def _mapped(size_bytes: int) -> mmap.mmap:
    chunk = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no huge pages
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
