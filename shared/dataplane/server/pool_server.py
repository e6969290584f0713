"""Server side of a pool for one connection: puts become landings, reads become a stream of blocks.

The backend is asked on the loop's thread only. Whatever it granted is given back when the connection ends.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from msgspec import Struct

from shared.dataplane.api import CommitReply
from shared.dataplane.memory.arena import Arena
from shared.dataplane.pool_backend import PoolBackend, PutGrant, ReadGrant
from shared.dataplane.server.incoming import Incoming
from shared.dataplane.server.landing import Landing, LandingTable, Reply
from shared.dataplane.transports.base import Connection
from shared.dataplane.wire.connection import Job
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.frames import Blocks, CloseRead, OpenPut, OpenRead, PutGranted, ReadGranted
from shared.dataplane.wire.framing import FRAME_BYTES
from shared.dataplane.wire.loop_calls import LoopCalls
from shared.protocol.errors import Internal, TsukimiError

G = TypeVar("G", PutGrant, ReadGrant)

MAX_PATIENCE_S = 600.0
"""No reader is waited for longer, whatever it asks."""

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
    patient_since: float | None = None
    """When a read that may be answered later was asked for (time.monotonic())."""
    lease: int | None = None
    """None until the backend has granted it."""
    pages: tuple[int, ...] = ()
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
        self._waiting: set[asyncio.Future[Any]] = set()
        self._lost = False

    def open_put(self, message: OpenPut, store: Arena) -> None:
        self._ask(
            lambda: self._backend.open_put(message.namespace, message.keys),
            lambda grant: self._put_granted(message, store, grant),
            lambda error: self._post(
                lambda connection: connection.send(
                    PutGranted(message.stream, [], as_error(error, "open_put").to_wire())
                )
            ),
        )

    def open_read(self, message: OpenRead, store: Arena) -> None:
        patience_s = min(message.patience_s, MAX_PATIENCE_S) if message.patience_s > 0.0 else 0.0
        read = self._reads[message.read] = OutgoingRead(time.monotonic() if patience_s else None)
        self._ask(
            lambda: self._backend.open_read(message.namespace, message.keys, patience_s),
            lambda grant: self._read_granted(message, read, store, grant),
            lambda error: self._read_refused(message, as_error(error, "open_read")),
        )

    def close_read(self, message: CloseRead) -> None:
        read = self._reads.pop(message.read, None)
        if read is not None:
            self._close(read)

    def lost(self) -> None:
        """No thread reads the pages any more."""
        self._lost = True
        for read in self._reads.values():
            self._close(read)
        self._reads.clear()

    def _ask(
        self,
        question: Callable[[], G | Awaitable[G]],
        granted: Callable[[G], None],
        refused: Callable[[Exception], object],
    ) -> None:
        """Go on with the backend's answer: at once, or when it comes."""
        try:
            answer = question()
        except Exception as e:
            refused(e)
            return
        if not inspect.isawaitable(answer):
            granted(answer)
            return
        task = asyncio.ensure_future(_outcome(answer))
        self._waiting.add(task)

        def ended(task: asyncio.Future[G | Exception]) -> None:
            self._waiting.discard(task)
            if task.cancelled():
                return
            outcome = task.result()
            if isinstance(outcome, Exception):
                refused(outcome)
            else:
                granted(outcome)

        task.add_done_callback(ended)

    def _put_granted(self, message: OpenPut, store: Arena, grant: PutGrant) -> None:
        if grant.wanted and self._lost:
            self._backend.abort_put(grant.landing)
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

    def _read_granted(self, message: OpenRead, read: OutgoingRead, store: Arena, grant: ReadGrant) -> None:
        read.lease, read.pages = grant.lease, grant.pages
        if read.closed:
            self._backend.close_read(grant.lease)
            return
        waited_s = 0.0 if read.patient_since is None else time.monotonic() - read.patient_since
        granted = ReadGranted(message.read, list(grant.checksums), waited_s=waited_s)
        self._post(lambda connection: connection.send(granted))
        if grant.pages:
            self._post(lambda connection: self._send_blocks(message.read, read, store, connection))

    def _read_refused(self, message: OpenRead, error: TsukimiError) -> None:
        self._reads.pop(message.read, None)
        self._post(lambda connection: connection.send(ReadGranted(message.read, [], error.to_wire())))

    def _close(self, read: OutgoingRead) -> None:
        read.closed = True
        if read.lease is not None:
            self._backend.close_read(read.lease)

    def _send_blocks(self, number: int, read: OutgoingRead, store: Arena, connection: Connection) -> None:
        step = max(1, FRAME_BYTES // store.layout.block_bytes)
        for first in range(0, len(read.pages), step):
            if read.closed:
                return
            pages = read.pages[first : first + step]
            connection.send(Blocks(number, first, len(pages)), store.extents(store.block_slices(pages)))
            self._counters.add("bytes_sent", len(pages) * store.layout.block_bytes)
            self._counters.add("slices_sent", len(pages) * store.layout.layers)


async def _outcome(answer: Awaitable[G]) -> G | Exception:
    try:
        return await answer
    except Exception as e:
        return e


def as_error(error: Exception, where: str) -> TsukimiError:
    """What a peer may know of it."""
    if isinstance(error, TsukimiError):
        return error
    log.error("pool_backend_failed", call=where, exc_info=error)
    return Internal("the pool failed; see its log")
