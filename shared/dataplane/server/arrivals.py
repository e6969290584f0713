"""Payloads off a connection into pages, verified slice by slice while they are warm in the cache."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from shared.dataplane.faults import Faults
from shared.dataplane.memory.arena import Arena
from shared.dataplane.transports.base import Connection, PeerLost
from shared.dataplane.wire.checksums import slice_checksums
from shared.dataplane.wire.counters import Counters

DROPPED = -1
"""In place of a checksum, which is never negative: the slice did not come."""


class Arrivals:
    """Thread-safe for different slices."""

    def __init__(self, counters: Counters, faults: Faults | None = None) -> None:
        self._counters = counters
        self._faults = faults
        self._ordinals = itertools.count()
        self._lock = threading.Lock()

    def take(
        self,
        connection: Connection,
        store: Arena,
        slices: Sequence[tuple[int, int]],
        keep: Callable[[], bool],
    ) -> list[int] | None:
        """Receive the last frame's payload into the (page, layer) slices. Returns their checksums as they are in memory,
        or None when keep() turned false on the way."""
        if not connection.take(store.extents(slices), keep):
            return None
        self._counters.add("slices_received", len(slices))
        self._counters.add("bytes_received", len(slices) * store.layout.slice_bytes)
        if self._faults is not None:
            return self._damaged(connection, store, slices)
        return slice_checksums(store, slices)

    def _damaged(self, connection: Connection, store: Arena, slices: Sequence[tuple[int, int]]) -> list[int]:
        assert self._faults is not None
        dropped = []
        for page, layer in slices:
            with self._lock:
                fault = self._faults(next(self._ordinals))
            dropped.append(fault is not None and fault.drop)
            if fault is None:
                continue
            time.sleep(fault.delay_s)
            if fault.corrupt:
                store.slice(page, layer)[0] ^= 0xFF
            if fault.cut:
                connection.cut()
                raise PeerLost("cut on purpose")
        checksums = slice_checksums(store, slices)
        return [DROPPED if gone else checksum for gone, checksum in zip(dropped, checksums, strict=True)]
