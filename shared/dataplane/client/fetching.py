"""Client side of a read: whole blocks out of a pool into own pages, each verified before the next counts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from shared.dataplane.api import FetchResult
from shared.dataplane.client.caller import Caller
from shared.dataplane.memory.arena import Arena
from shared.dataplane.server.arrivals import DROPPED, Arrivals
from shared.dataplane.server.fence import Fence
from shared.dataplane.transports.base import Connection, PeerLost
from shared.dataplane.wire.checksums import block_checksum
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.frames import Blocks, CloseRead, OpenRead, ReadGranted
from shared.dataplane.wire.framing import Frame
from shared.protocol.errors import TsukimiError
from shared.protocol.ids import BlockKey


class Fetch:
    def __init__(
        self, caller: Caller, store: Arena, pages: Sequence[int], arrivals: Arrivals, counters: Counters
    ) -> None:
        self._caller = caller
        self._store = store
        self._pages = tuple(pages)
        self._arrivals = arrivals
        self._counters = counters
        self._fence = Fence()
        self._checksums: list[int] = []
        self._verified = 0
        self._waited_s = 0.0
        self._answered: Future[None] = Future()
        """Done once the pool has said what it has, or never will."""
        self._done: Future[FetchResult] = Future()
        self.number = caller.add(self)

    async def run(
        self, namespace: bytes, keys: Sequence[BlockKey], fence_wait_s: float, patience_s: float = 0.0
    ) -> FetchResult:
        """When it returns, or is cancelled, no thread writes into the pages any more."""
        self._caller.send(OpenRead(self.number, namespace, list(keys), patience_s))
        try:
            await self._caller.wait(self._answered, patience_s)
            return await self._caller.wait(self._done)
        finally:
            self._caller.remove(self.number)
            self._caller.send(CloseRead(self.number))
            self._fence.close()
            if not await self._fence.wait_quiet(fence_wait_s):
                self._caller.link.sever(PeerLost("it sent too slowly for a fetch that was given up"))
                await self._fence.wait_quiet()

    def on_frame(self, frame: Frame, connection: Connection) -> None:
        match frame.message:
            case ReadGranted(error=None, checksums=checksums, waited_s=waited_s):
                self._checksums = checksums[: len(self._pages)]
                self._waited_s = waited_s
                self._answer()
                if not checksums:
                    self._end("the pool holds none of it")
            case ReadGranted(error=error):
                self._end(error.message if error is not None else "")
            case Blocks() as message:
                with self._fence.writing() as entered:
                    error_text = self._receive(message, connection) if entered else ""
                if error_text or self._verified == len(self._checksums):
                    self._end(error_text)

    def on_lost(self, error: TsukimiError) -> None:
        self._end(error.message)

    def _receive(self, message: Blocks, connection: Connection) -> str:
        """Returns what is wrong with the first block that is; the ones before it count."""
        pages = self._pages[message.first : message.first + message.count]
        past_the_grant = message.first + message.count > len(self._checksums)
        if message.first != self._verified or past_the_grant or not pages:
            raise PeerLost(f"blocks {message.first}+{message.count} came instead of {self._verified}")
        slices = list(self._store.block_slices(pages))
        found = self._arrivals.take(connection, self._store, slices, self._fence.open)
        if found is None:
            return "given up"
        layers = self._store.layout.layers
        for at in range(0, len(found), layers):
            error = self._verify(found[at : at + layers])
            if error:
                return error
        return ""

    def _verify(self, slices: list[int]) -> str:
        block = self._verified
        if DROPPED in slices:
            return f"block {block} is missing layer {slices.index(DROPPED)}"
        if block_checksum(slices) != self._checksums[block]:
            self._counters.add("blocks_corrupt")
            return f"block {block} is corrupt"
        self._verified += 1
        self._counters.add("blocks_fetched")
        return ""

    def _end(self, error: str) -> None:
        self._answer()
        if not self._done.done():
            blocks = self._verified
            size_bytes = blocks * self._store.layout.block_bytes
            self._done.set_result(FetchResult(blocks, size_bytes, error, self._waited_s))

    def _answer(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)
