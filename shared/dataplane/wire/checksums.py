"""xxh3-64 over slices and blocks. Not cryptographic: it finds damage, not malice."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable

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
