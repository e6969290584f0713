"""Events and commands of a cache node's machine (core.cache.machine)."""

from __future__ import annotations

from shared.core.machine import Command, Event
from shared.protocol.ids import BlockKey, LandingId

Lease = int
"""Names one read; minted by the shell, never reused in one life."""

# -- events ----------------------------------------------------------------------------------------------------------


class ArenaLaidOut(Event, frozen=True):
    """The arena is laid out and has `pages` pages. Comes once per life; before it there are no pages."""

    pages: int


class PutOpened(Event, frozen=True):
    """A writer offers blocks. keys[i] follows keys[i-1] in its chain. Answered by GrantPut."""

    landing: LandingId
    """Minted for this put."""
    namespace: bytes
    keys: tuple[BlockKey, ...]


class PutProgressed(Event, frozen=True):
    """Data still arrives for these puts: their leases are renewed."""

    landings: tuple[LandingId, ...]


class PutCommitted(Event, frozen=True):
    """The writer is done and its landing is closed. Answered by ConfirmPut."""

    landing: LandingId
    checksums: dict[int, int]
    """Index into the put's keys -> checksum. Contains the wanted blocks that arrived whole, passed verification and are
    covered by the writer's commit."""


class PutAborted(Event, frozen=True):
    """The writer gave up or was lost, and its landing is closed."""

    landing: LandingId


class PutFenced(Event, frozen=True):
    """FencePut has been carried out: no thread writes into the pages any more."""

    landing: LandingId


class ReadOpened(Event, frozen=True):
    """A reader wants as many of these blocks as are here, from the first on. Answered by GrantRead."""

    lease: Lease
    namespace: bytes
    keys: tuple[BlockKey, ...]


class ReadClosed(Event, frozen=True):
    lease: Lease


# -- commands --------------------------------------------------------------------------------------------------------


class GrantPut(Command, frozen=True):
    """Let the writer put keys[wanted[j]] into pages[j]. The other blocks are already here, are being written by another
    put, or do not fit."""

    landing: LandingId
    wanted: tuple[int, ...]
    pages: tuple[int, ...]


class ConfirmPut(Command, frozen=True):
    """Answer a commit: it made `stored` blocks readable. 0 if the put is not open any more."""

    landing: LandingId
    stored: int


class FencePut(Command, frozen=True):
    """The put's lease ran out: close its landing. Ends in PutFenced; the pages are not reused before."""

    landing: LandingId


class GrantRead(Command, frozen=True):
    """The leading blocks that are here, in key order. They stay in place until ReadClosed or the end of the lease."""

    lease: Lease
    pages: tuple[int, ...]
    checksums: tuple[int, ...]
