"""Room that one writer may write blocks into: what has arrived of them, and the fence around it."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from shared.dataplane.api import CommitReply, LandingStats
from shared.dataplane.server.arrivals import DROPPED
from shared.dataplane.server.fence import Fence
from shared.dataplane.wire.checksums import block_checksum
from shared.protocol.ids import LandingId

MISSING, VERIFIED, CORRUPT = 0, 1, 2


Reply = Callable[[CommitReply], None]


class Ending(Protocol):
    """Who is told how a landing ended: exactly one of these, once, from a data plane thread. The pages are quiet by
    then, and nothing more will be written."""

    def committed(self, landing: Landing, blocks: int, info: bytes, reply: Reply) -> None:
        """The writer vouches for the blocks of indices below `blocks`. Must reply sooner or later."""
        ...

    def failed(self, landing: Landing, error: str) -> None:
        """The writer gave up or was lost."""
        ...


class Landing:
    """`pages` maps block indices to pages. Only the thread of the connection it is bound to writes and records."""

    def __init__(
        self,
        landing: LandingId,
        pages: Mapping[int, int],
        layers: int,
        ending: Ending,
    ) -> None:
        self.id = landing
        self.pages = dict(pages)
        self.fence = Fence()
        self.ending = ending
        self._layers = layers
        self._rows = {block: row * layers for row, block in enumerate(self.pages)}
        self._state = bytearray(len(self.pages) * layers)
        self._checksums = array.array("Q", bytes(8 * len(self._state)))
        self._lock = threading.Lock()
        self.writer: object = None
        self._slices = 0
        self._bytes = 0
        self._first_slice_at = 0.0

    def bind(self, writer: object) -> bool:
        """Make `writer` the one who writes here. False when there was one before: landings are never shared."""
        with self._lock:
            if self.writer is not None or not self.fence.open():
                return False
            self.writer = writer
            return True

    def record(
        self, layer: int, blocks: list[int], expected: list[int], found: list[int], slice_bytes: int
    ) -> int:
        """Note slices that came; a later one supersedes an earlier one. Returns how many were corrupt."""
        corrupt = 0
        if not self._slices:
            self._first_slice_at = time.monotonic()
        for block, want, got in zip(blocks, expected, found, strict=True):
            if got == DROPPED:
                continue
            at = self._rows[block] + layer
            self._checksums[at] = got
            self._state[at] = VERIFIED if want == got else CORRUPT
            corrupt += want != got
        self._slices += len(blocks)
        self._bytes += len(blocks) * slice_bytes
        return corrupt

    def flaw(self, blocks: int) -> str:
        """What is wrong with the landing's blocks of indices below `blocks`; empty if all are whole and verified."""
        for block, row in self._rows.items():
            if block < blocks and self._state.count(VERIFIED, row, row + self._layers) != self._layers:
                return self._name_flaw(block, row)
        return ""

    def whole_blocks(self, blocks: int) -> dict[int, int]:
        """Block checksums of those with an index below `blocks` that are whole and verified."""
        found = {}
        for block, row in self._rows.items():
            end = row + self._layers
            if block < blocks and self._state.count(VERIFIED, row, end) == self._layers:
                found[block] = block_checksum(self._checksums[row:end])
        return found

    def corrupt_blocks(self) -> int:
        rows = self._rows.values()
        return sum(self._state.find(CORRUPT, row, row + self._layers) >= 0 for row in rows)

    def stats(self) -> LandingStats:
        return LandingStats(self._slices, self._bytes, self._first_slice_at)

    def _name_flaw(self, block: int, row: int) -> str:
        layers = self._state[row : row + self._layers]
        bad = layers.find(CORRUPT)
        if bad >= 0:
            return f"block {block} is corrupt in layer {bad}"
        return f"block {block} is missing layer {layers.find(MISSING)}"


class LandingTable:
    """All open landings of an endpoint. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landings: dict[LandingId, Landing] = {}

    def add(self, landing: Landing) -> None:
        """Raises ValueError on an id that is in use: ids are minted once."""
        with self._lock:
            if landing.id in self._landings:
                raise ValueError(f"landing {landing.id.hex()} is open already")
            self._landings[landing.id] = landing

    def get(self, landing: LandingId) -> Landing | None:
        with self._lock:
            return self._landings.get(landing)

    def remove(self, landing: LandingId) -> None:
        """Idempotent."""
        with self._lock:
            self._landings.pop(landing, None)
