"""Client side of a write stream: layer slices to a landing, or to the landing that a pool opens for a put."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from shared.dataplane.api import CommitReply
from shared.dataplane.client.caller import Caller
from shared.dataplane.memory.arena import Arena
from shared.dataplane.transports.base import Connection
from shared.dataplane.wire.checksums import SharedChecksums, slice_checksums
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.frames import Abort, Commit, OpenPut, OpenWrite, PutGranted, StreamEnded, Write
from shared.dataplane.wire.framing import FRAME_BYTES, Frame
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import BlockKey, LandingId

MAX_FRAME_SLICES = 1024


class OutgoingStream:
    """A WriteStream. The pages are read by the sending thread alone (and by a peer on the same host): when the stream's
    last frame has been answered, or the connection is over, nobody reads them any more."""

    def __init__(self, caller: Caller, store: Arena, counters: Counters) -> None:
        self._caller = caller
        self._store = store
        self._counters = counters
        self._lock = threading.Lock()
        self._over = False
        """Writes are dropped from now on."""
        self._last: Commit | Abort | None = None
        self._last_sent = False
        self._early: CommitReply | None = None
        """The peer ended the stream before it was asked to."""
        self._done: Future[CommitReply] = Future()
        self.number = 0
        self.number = caller.add(self)

    def open(self, landing: LandingId) -> None:
        self._caller.send(OpenWrite(self.number, landing))

    def write(
        self, layer: int, blocks: Sequence[tuple[int, int]], checksums: SharedChecksums | None = None
    ) -> None:
        """See WriteStream. Slices the engine still writes to are sent as they are; a later write of them, once they are
        complete, supersedes that."""
        if blocks and not self._over:
            self._caller.link.post(functools.partial(self._send, layer, tuple(blocks), checksums), wait=True)

    async def commit(self, blocks: int, info: bytes = b"") -> CommitReply:
        """See WriteStream. Idempotent: a second call waits for the first one's verdict, and so does one after abort."""
        self._finish(Commit(self.number, blocks, info))
        return await self._caller.wait(self._done)

    async def abort(self) -> None:
        """See WriteStream. Idempotent."""
        self._over = True
        self._finish(Abort(self.number))
        await self._caller.wait(self._done)

    def on_frame(self, frame: Frame, connection: Connection) -> None:
        message = frame.message
        if isinstance(message, StreamEnded):
            self._on_ended(CommitReply(message.ok, message.error, message.stored))

    def on_lost(self, error: TsukimiError) -> None:
        self._over = True
        self._resolve(CommitReply(False, error.message))

    def _send(
        self,
        layer: int,
        blocks: tuple[tuple[int, int], ...],
        shared: SharedChecksums | None,
        connection: Connection,
    ) -> None:
        store = self._store
        size = store.layout.slice_bytes
        step = min(MAX_FRAME_SLICES, max(1, FRAME_BYTES // size))
        for first in range(0, len(blocks), step):
            if self._over:
                return
            part = blocks[first : first + step]
            slices = [(page, layer) for _, page in part]
            if shared is None:
                checksums = slice_checksums(store, slices)
            else:
                checksums = shared.of(store, [page for _, page in part])
            message = Write(self.number, layer, [block for block, _ in part], checksums)
            connection.send(message, store.extents(slices))
            self._counters.add("slices_sent", len(part))
            self._counters.add("bytes_sent", len(part) * size)

    def _finish(self, last: Commit | Abort) -> None:
        with self._lock:
            if self._last is not None:
                return
            self._last = last
        self._caller.link.post(functools.partial(self._send_last, last))

    def _send_last(self, last: Commit | Abort, connection: Connection) -> None:
        """Behind everything written: with it sent, this process reads the pages no more."""
        self._over = True
        with self._lock:
            early = self._early
            self._last_sent = early is None
        if early is not None:
            self._resolve(early)
        else:
            connection.send(last)

    def _on_ended(self, reply: CommitReply) -> None:
        self._over = True
        with self._lock:
            if not self._last_sent:
                self._early = reply
                return
        self._resolve(reply)

    def _resolve(self, reply: CommitReply) -> None:
        with self._lock:
            if not self._done.done():
                self._done.set_result(reply)
        self._caller.remove(self.number)


class OutgoingPut(OutgoingStream):
    """A PutStream, once `granted` is done."""

    def __init__(self, caller: Caller, store: Arena, counters: Counters) -> None:
        self.wanted: frozenset[int] = frozenset()
        self._granted: Future[PutGranted | TsukimiError] = Future()
        self._abandoned = False
        super().__init__(caller, store, counters)

    async def offer(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """Raises what the pool refuses with, Unavailable if it cannot be reached."""
        self._caller.send(OpenPut(self.number, namespace, list(keys)))
        try:
            answer = await self._caller.wait(self._granted)
        except BaseException:
            self._abandoned = True
            raise
        if isinstance(answer, TsukimiError):
            raise answer

    def write(
        self, layer: int, blocks: Sequence[tuple[int, int]], checksums: SharedChecksums | None = None
    ) -> None:
        wanted = self.wanted
        super().write(layer, [block for block in blocks if block[0] in wanted], checksums)

    def on_frame(self, frame: Frame, connection: Connection) -> None:
        message = frame.message
        if not isinstance(message, PutGranted):
            super().on_frame(frame, connection)
        elif message.error is not None:
            self._answer(message.error.to_exception())
            self._on_ended(CommitReply(False, message.error.message))
            self._caller.remove(self.number)
        else:
            self.wanted = frozenset(message.wanted)
            if not message.wanted:
                self._on_ended(CommitReply(True))
            if self._abandoned:
                self._finish(Abort(self.number))
            self._answer(message)

    def on_lost(self, error: TsukimiError) -> None:
        self._answer(error)
        super().on_lost(error)

    def _answer(self, answer: PutGranted | TsukimiError) -> None:
        if not self._granted.done():
            self._granted.set_result(answer)
