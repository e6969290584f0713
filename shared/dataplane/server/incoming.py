"""Server side of write streams: one connection's frames into the landings they are bound to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shared.dataplane.api import CommitReply
from shared.dataplane.memory.arena import Arena
from shared.dataplane.server.arrivals import Arrivals
from shared.dataplane.server.landing import Landing, LandingTable
from shared.dataplane.transports.base import Connection
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.frames import Abort, Commit, OpenWrite, StreamEnded, Write

CLOSED = "the landing was closed"


class Incoming:
    """Everything here runs in the connection's reading thread, save `adopt`."""

    def __init__(
        self,
        table: LandingTable,
        arrivals: Arrivals,
        counters: Counters,
        answer: Callable[[StreamEnded], object],
    ) -> None:
        self._table = table
        self._arrivals = arrivals
        self._counters = counters
        self._answer = answer
        self._lock = threading.Lock()
        self._streams: dict[int, Landing] = {}
        self._lost = False

    def adopt(self, stream: int, landing: Landing) -> bool:
        """Bind a stream to a landing, from any thread. False: another has it, or the connection is lost."""
        with self._lock:
            if self._lost or stream in self._streams or not landing.bind(self):
                return False
            self._streams[stream] = landing
            return True

    def open_write(self, message: OpenWrite) -> None:
        landing = self._table.get(message.landing)
        if landing is None:
            self._refuse(message.stream, f"landing {message.landing.hex()} is not open here")
        elif not self.adopt(message.stream, landing):
            self._refuse(message.stream, f"landing {message.landing.hex()} has or had another writer")

    def write(self, message: Write, store: Arena, connection: Connection) -> None:
        landing = self._streams.get(message.stream)
        if landing is None:
            self._counters.add("stale_writes_refused", len(message.blocks))
            return
        pages = [landing.pages.get(block, -1) for block in message.blocks]
        if -1 in pages or not 0 <= message.layer < store.layout.layers:
            self._drop(message.stream, "a slice outside the landing was written")
            return
        if len(message.checksums) != len(pages):
            self._drop(message.stream, "slices came without checksums")
            return
        if not self._arrive(message, landing, pages, store, connection):
            self._counters.add("stale_writes_refused", len(pages))
            self._drop(message.stream, CLOSED)

    def commit(self, message: Commit) -> None:
        landing = self._take_out(message.stream)
        if landing is None:
            return
        if not landing.fence.open():
            self._fail(landing, CLOSED)
            self._refuse(message.stream, CLOSED)
            return

        def reply(verdict: CommitReply) -> None:
            self._answer(StreamEnded(message.stream, verdict.ok, verdict.error, verdict.stored))

        landing.fence.close()
        self._counters.add("blocks_corrupt", landing.corrupt_blocks())
        landing.ending.committed(landing, message.blocks, message.info, reply)

    def abort(self, message: Abort) -> None:
        landing = self._take_out(message.stream)
        if landing is not None:
            self._fail(landing, "the writer gave up")
        self._answer(StreamEnded(message.stream, False, "aborted"))

    def lost(self, reason: str) -> None:
        """The connection is over and its threads touch nothing more."""
        with self._lock:
            self._lost = True
            landings = list(self._streams.values())
            self._streams.clear()
        for landing in landings:
            self._fail(landing, f"the writer was lost: {reason}")

    def _arrive(
        self, message: Write, landing: Landing, pages: list[int], store: Arena, connection: Connection
    ) -> bool:
        with landing.fence.writing() as entered:
            if not entered:
                return False
            slices = [(page, message.layer) for page in pages]
            found = self._arrivals.take(connection, store, slices, landing.fence.open)
            if found is None:
                return False
            size = store.layout.slice_bytes
            corrupt = landing.record(message.layer, message.blocks, message.checksums, found, size)
        if corrupt:
            self._counters.add("slices_corrupt", corrupt)
        return True

    def _take_out(self, stream: int) -> Landing | None:
        with self._lock:
            return self._streams.pop(stream, None)

    def _drop(self, stream: int, error: str) -> None:
        landing = self._take_out(stream)
        if landing is not None:
            self._fail(landing, error)
        self._refuse(stream, error)

    def _refuse(self, stream: int, error: str) -> None:
        self._answer(StreamEnded(stream, False, error))

    @staticmethod
    def _fail(landing: Landing, error: str) -> None:
        landing.fence.close()
        landing.ending.failed(landing, error)
