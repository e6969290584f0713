"""Server side of a pool for one connection: puts become landings, reads become a stream of blocks.

The backend is asked on the loop's thread only. Whatever it granted is given back when the connection ends.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec import Struct

from shared.dataplane.api import CommitReply, PoolBackend
from shared.dataplane.memory.arena import Arena
from shared.dataplane.server.incoming import Incoming
from shared.dataplane.server.landing import Landing, LandingTable, Reply
from shared.dataplane.transports.base import Connection
from shared.dataplane.wire.connection import Job
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.frames import Blocks, CloseRead, OpenPut, OpenRead, PutGranted, ReadGranted
from shared.dataplane.wire.loop_calls import LoopCalls
from shared.protocol.errors import Internal, TsukimiError

FRAME_BYTES = 4 << 20
"""Aim for the payload of one frame: big enough to be cheap, small enough to be verified in the cache."""

log = structlog.get_logger()


class PutEnding:
    """Tells the backend; the landing is gone from the table by then."""

    def __init__(self, backend: PoolBackend, table: LandingTable, calls: LoopCalls) -> None:
        self._backend = backend
        self._table = table
        self._calls = calls

    def committed(self, landing: Landing, blocks: int, info: bytes, reply: Reply) -> None:
        self._table.remove(landing.id)
        self._calls.soon(self._commit, landing, landing.whole_blocks(blocks), landing.flaw(blocks), reply)

    def failed(self, landing: Landing, error: str) -> None:
        self._table.remove(landing.id)
        self._calls.soon(self._backend.abort_put, landing.id)

    def _commit(self, landing: Landing, checksums: dict[int, int], error: str, reply: Reply) -> None:
        try:
            stored = self._backend.commit_put(landing.id, checksums)
        except Exception as e:
            reply(CommitReply(False, as_error(e, "commit_put").message))
            raise
        reply(CommitReply(not error, error, stored))


class OutgoingRead(Struct):
    lease: int
    pages: tuple[int, ...]
    closed: bool = False


class PoolSession:
    """All methods on the loop's thread, except for the sending of blocks."""

    def __init__(
        self,
        backend: PoolBackend,
        table: LandingTable,
        incoming: Incoming,
        counters: Counters,
        calls: LoopCalls,
        post: Callable[[Job], object],
    ) -> None:
        self._backend = backend
        self._table = table
        self._incoming = incoming
        self._counters = counters
        self._calls = calls
        self._post = post
        self._reads: dict[int, OutgoingRead] = {}

    def open_put(self, message: OpenPut, store: Arena) -> None:
        try:
            grant = self._backend.open_put(message.namespace, message.keys)
        except Exception as e:
            error = as_error(e, "open_put").to_wire()
            self._post(lambda connection: connection.send(PutGranted(message.stream, [], error)))
            return
        if grant.wanted:
            pages = dict(zip(grant.wanted, grant.pages, strict=True))
            ending = PutEnding(self._backend, self._table, self._calls)
            landing = Landing(grant.landing, pages, store.layout.layers, ending)
            self._table.add(landing)
            if not self._incoming.adopt(message.stream, landing):
                self._table.remove(landing.id)
                self._backend.abort_put(landing.id)
                return
        self._post(lambda connection: connection.send(PutGranted(message.stream, list(grant.wanted))))

    def open_read(self, message: OpenRead, store: Arena) -> None:
        try:
            grant = self._backend.open_read(message.namespace, message.keys)
        except Exception as e:
            error = as_error(e, "open_read").to_wire()
            self._post(lambda connection: connection.send(ReadGranted(message.read, [], error)))
            return
        read = OutgoingRead(grant.lease, grant.pages)
        self._reads[message.read] = read
        self._post(lambda connection: connection.send(ReadGranted(message.read, list(grant.checksums))))
        if grant.pages:
            self._post(lambda connection: self._send_blocks(message.read, read, store, connection))

    def close_read(self, message: CloseRead) -> None:
        read = self._reads.pop(message.read, None)
        if read is not None:
            read.closed = True
            self._backend.close_read(read.lease)

    def lost(self) -> None:
        """No thread reads the pages any more."""
        for read in self._reads.values():
            self._backend.close_read(read.lease)
        self._reads.clear()

    def _send_blocks(self, number: int, read: OutgoingRead, store: Arena, connection: Connection) -> None:
        step = max(1, FRAME_BYTES // store.layout.block_bytes)
        for first in range(0, len(read.pages), step):
            if read.closed:
                return
            pages = read.pages[first : first + step]
            connection.send(Blocks(number, first, len(pages)), store.extents(store.block_slices(pages)))
            self._counters.add("bytes_sent", len(pages) * store.layout.block_bytes)
            self._counters.add("slices_sent", len(pages) * store.layout.layers)


def as_error(error: Exception, where: str) -> TsukimiError:
    """What a peer may know of it."""
    if isinstance(error, TsukimiError):
        return error
    log.error("pool_backend_failed", call=where, exc_info=error)
    return Internal("the pool failed; see its log")
