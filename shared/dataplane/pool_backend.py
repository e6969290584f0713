"""What an endpoint asks of a pool: room for blocks, and pages to read.

A storage tier below memory is another implementation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from msgspec import Struct

from shared.protocol.ids import BlockKey, LandingId


class PutGrant(Struct, frozen=True):
    """A cache node's answer to a put: which of the keys it wants (indices), under which landing, into which
    pages."""

    landing: LandingId
    wanted: tuple[int, ...]
    pages: tuple[int, ...] = ()


class ReadGrant(Struct, frozen=True):
    """Pages, pinned under a lease, of the longest run of keys held from the first on, with block
    checksums."""

    lease: int
    pages: tuple[int, ...]
    checksums: tuple[int, ...]


class PoolBackend(Protocol):
    """What makes an endpoint serve a pool. Called on the event loop's thread; all idempotent.

    An open may take its time, for a tier below memory: it then returns an awaitable. Nobody else waits for it. If the
    caller is gone by then, the grant is given back at once, by abort_put or close_read.
    """

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> PutGrant | Awaitable[PutGrant]:
        """Room for those of the blocks that the pool wants."""
        ...

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        """checksums: index among `wanted` -> block checksum, only of blocks that arrived whole and verified.
        Publishes them; returns how many were stored (0 for an unknown or expired landing)."""
        ...

    def abort_put(self, landing: LandingId) -> None:
        """Called once no thread writes into its pages any more."""
        ...

    def open_read(
        self, namespace: bytes, keys: Sequence[BlockKey], patience_s: float = 0.0
    ) -> ReadGrant | Awaitable[ReadGrant]:
        """The longest run of blocks held from the first key on. Their pages can be read once this is answered.

        `patience_s`: seconds that the reader is willing to wait for blocks that are still being written. A backend may
        answer as soon as all are there, and does after that time with what it has."""
        ...

    def close_read(self, lease: int) -> None: ...
