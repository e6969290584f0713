"""What services may ask of the data plane. Implementations: dataplane.endpoint over dataplane.transports.

Data moves in layer slices (protocol.model.KVLayout). Every slice carries an xxh3-64 checksum that the
receiver verifies; a block's checksum is xxh3-64 over its slices' checksums (little-endian u64, layer order),
kept with the block in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from shared.dataplane.pool_backend import PoolBackend
from shared.dataplane.wire.checksums import SharedChecksums
from shared.protocol.ids import BlockKey, LandingId, NodeRef
from shared.protocol.model import KVLayout


class PageStore(Protocol):
    """Memory that holds blocks: an engine's KV pages or a cache node's arena. Backed by a memfd, so that a
    process on the same host can be handed it by descriptor; nothing of it ever appears in a file system."""

    layout: KVLayout
    pages: int

    def slice(self, page: int, layer: int) -> memoryview:
        """Writable bytes of one layer of one page, `layout.slice_bytes` long, contiguous."""
        ...


class LandingCommit(Struct, frozen=True):
    """A writer's last word on a landing. `info` is the writer's own message to the receiver (msgpack)."""

    landing: LandingId
    ok: bool
    info: bytes = b""
    error: str = ""
    """Why not ok: which block is missing or corrupt, or that the writer's connection was lost."""


class LandingStats(Struct, frozen=True):
    slices: int
    bytes: int
    first_slice_at: float
    """time.monotonic() when the first slice had arrived (same-host comparisons only)."""


class FetchResult(Struct, frozen=True):
    """blocks: contiguous verified blocks from the first key on."""

    blocks: int
    bytes: int = 0
    error: str = ""
    waited_s: float = 0.0
    """Seconds that the pool waited for blocks before it sent the first."""


class CommitReply(Struct, frozen=True):
    ok: bool
    error: str = ""
    stored: int = 0
    """Of a put: how many blocks became readable by it."""


class WriteStream(Protocol):
    """Layer slices to one landing. Thread-safe for one writer thread at a time."""

    def write(
        self, layer: int, blocks: Sequence[tuple[int, int]], checksums: SharedChecksums | None = None
    ) -> None:
        """Queue one layer of blocks, (index in the landing, own page) each. Returns at once unless the
        bounded queue is full, then waits. A slice may be written again, and its page may change until then (a block
        that the next chunk fills up); after its last write it must stay as it is until commit or abort has
        returned. Never raises on a lost peer: commit tells.

        `checksums`: shared with the other streams that send the same slices."""
        ...

    async def commit(self, blocks: int, info: bytes = b"") -> CommitReply:
        """Everything is sent; returns the receiver's verdict. A lost peer or refused landing is ok=False."""
        ...

    async def abort(self) -> None:
        """Returns once no thread reads the pages any more."""
        ...


class PutStream(WriteStream, Protocol):
    """commit(blocks) vouches for the keys of indices below `blocks`: those of them that are wanted, whole and verified
    become readable (CommitReply.stored says how many), the others do not. A block that is not full must not be vouched
    for."""

    wanted: frozenset[int]
    """Indices among the offered keys that the pool lacks; writes of others are dropped."""


class DataPlane(Protocol):
    """One per process: receives into and serves from one PageStore, and talks to peers."""

    @property
    def ref(self) -> NodeRef:
        """Own addresses, after start."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Idempotent. Ends threads, sockets and mappings."""
        ...

    def open_landing(
        self, landing: LandingId, pages: Sequence[int], on_commit: Callable[[LandingCommit], None]
    ) -> None:
        """Accept slices for `landing` straight into pages. on_commit is called once, on the loop's thread,
        when the writer commits (ok only if every slice of every block arrived and verified), gives up, or its
        connection is lost. By then the landing is closed and its pages are quiet; landing_stats still answers
        while on_commit runs. It is not called any more once close_landing has been."""
        ...

    async def close_landing(self, landing: LandingId) -> None:
        """Fence: later slices for it are refused, and on return no thread writes into its pages.
        Idempotent."""
        ...

    def landing_stats(self, landing: LandingId) -> LandingStats | None: ...

    def serve_pool(self, backend: PoolBackend) -> None: ...

    async def fetch(
        self,
        source: NodeRef,
        namespace: bytes,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        patience_s: float = 0.0,
    ) -> FetchResult:
        """Pull blocks from a pool into own pages, verified. Never raises on a lost or refusing peer:
        blocks=0 and why. The pool may wait up to `patience_s` seconds until it has all of them."""
        ...

    def open_write(self, target: NodeRef, landing: LandingId) -> WriteStream:
        """Returns at once; connects in the background. The transport (shm on the same host, else tcp) is
        chosen here."""
        ...

    async def open_put(self, target: NodeRef, namespace: bytes, keys: Sequence[BlockKey]) -> PutStream:
        """Raises Unavailable if the peer cannot be reached, Refused on another layout."""
        ...

    def forget(self, node: str, keep_incarnation: str = "") -> None:
        """Drop cached connections to lives of `node` other than keep_incarnation."""
        ...

    def counters(self) -> dict[str, float]:
        """bytes_sent, bytes_received, slices_sent, slices_received, blocks_corrupt, stale_writes_refused,
        ... (monotonic)."""
        ...
