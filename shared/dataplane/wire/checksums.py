"""xxh3-64 over slices and blocks. Not cryptographic: it finds damage, not malice."""

from __future__ import annotations

import array
import sys
import threading
from collections.abc import Iterable, Sequence

import xxhash

from shared.dataplane.memory.arena import Arena


def slice_checksum(data: memoryview | bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


def block_checksum(slices: Iterable[int]) -> int:
    """Of a whole block, from its slices' checksums in layer order."""
    packed = array.array("Q", slices)
    if sys.byteorder == "big":
        packed.byteswap()
    return int(xxhash.xxh3_64_intdigest(packed.tobytes()))


def slice_checksums(store: Arena, slices: Iterable[tuple[int, int]]) -> list[int]:
    """Of the (page, layer) slices as they are in memory now."""
    digest, view = xxhash.xxh3_64_intdigest, store.slice
    return [digest(view(page, layer)) for page, layer in slices]


class SharedChecksums:
    """Checksums of one layer's slices, each computed once for all streams that send them. Thread-safe.

    Valid only for pages whose content no longer changes while the streams send them.
    """

    def __init__(self, layer: int, pages: Iterable[int]) -> None:
        self._layer = layer
        self._final = frozenset(pages)
        self._known: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, store: Arena, pages: Sequence[int]) -> list[int]:
        """One checksum a page. Pages that were not named as final are read anew each time."""
        with self._lock:
            lacking = [page for page in pages if page in self._final and page not in self._known]
            found = slice_checksums(store, [(page, self._layer) for page in lacking])
            self._known.update(zip(lacking, found, strict=True))
            known = [self._known.get(page) for page in pages]
        return [
            slice_checksum(store.slice(page, self._layer)) if checksum is None else checksum
            for page, checksum in zip(pages, known, strict=True)
        ]
