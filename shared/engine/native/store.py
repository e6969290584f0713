"""Where packed weights are: in huge pages where the system has them, since every step reads them all."""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch

CHUNK_BYTES = 256 << 20
"""What nothing is put into takes no memory."""
ALIGN_BYTES = 64


class Store:
    """Gives out tensors side by side. The memory goes when the last of a chunk's tensors goes."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros."""
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
        with contextlib.suppress(OSError):  # a kernel without them
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
