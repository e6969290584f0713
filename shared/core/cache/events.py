"""Events and commands of a cache node's machine (core.cache.machine)."""

from __future__ import annotations

from shared.core.machine import Command, Event
from shared.protocol.ids import BlockKey, LandingId

Lease = int
"""Names one read; minted by the shell, never reused in one life."""

# -- events ----------------------------------------------------------------------------------------------------------


class ArenaLaidOut(Event, frozen=True):
    """There is room now: so many pages. Once in a life; before it there are none."""

    pages: int


class PutOpened(Event, frozen=True):
    """Somebody offers blocks. keys[i] follows keys[i-1] in its chain. Answered by GrantPut."""

    landing: LandingId
    """Minted for this put."""
    namespace: bytes
    keys: tuple[BlockKey, ...]


class PutProgressed(Event, frozen=True):
    """Data still arrives for these puts: their leases begin anew."""

    landings: tuple[LandingId, ...]


class PutCommitted(Event, frozen=True):
    """The writer is done and its landing closed. Answered by ConfirmPut."""

    landing: LandingId
    checksums: dict[int, int]
    """Index among the put's keys -> checksum, of wanted blocks that came whole and verified and are vouched for."""


class PutAborted(Event, frozen=True):
    """The writer gave up or was lost, and its landing is closed."""

    landing: LandingId


class PutFenced(Event, frozen=True):
    """FencePut is carried out: no thread writes into the pages any more."""

    landing: LandingId


class ReadOpened(Event, frozen=True):
    """Somebody wants the longest run of these blocks there is. Answered by GrantRead."""

    lease: Lease
    namespace: bytes
    keys: tuple[BlockKey, ...]


class ReadClosed(Event, frozen=True):
    lease: Lease


# -- commands --------------------------------------------------------------------------------------------------------


class GrantPut(Command, frozen=True):
    """Let the writer put keys[wanted[j]] into pages[j]. The other blocks are here, or on their way, or find no room."""

    landing: LandingId
    wanted: tuple[int, ...]
    pages: tuple[int, ...]


class ConfirmPut(Command, frozen=True):
    """Answer a commit: so many blocks became readable by it. 0 also for a put that is not open any more."""

    landing: LandingId
    stored: int


class FencePut(Command, frozen=True):
    """The put's lease ran out: close its landing. Ends in PutFenced, until when the pages are not used again."""

    landing: LandingId


class GrantRead(Command, frozen=True):
    """The run of blocks from the first key on, held in place until ReadClosed or the end of the lease."""

    lease: Lease
    pages: tuple[int, ...]
    checksums: tuple[int, ...]
