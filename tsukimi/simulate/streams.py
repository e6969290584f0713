"""The data plane in simulated time: pulls, hand-overs and pool writes as flows over the hosts' links.

Hand-overs and pool writes follow the computation. A step's KV flows while its layers are computed, as if it were there
from the step's start. Nothing is committed before the step ends and all of its KV has arrived. The last layer's time on
the wire, which nothing could hide, is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.core.worker.transfers import (
    BlocksFetched,
    CommitHandoff,
    FetchBlocks,
    HandoffEnded,
    LandingArrived,
    LandingFailed,
    OpenHandoff,
    OpenPoolWrite,
    PoolWriteEnded,
    patience_s,
)
from shared.protocol.model import KVLayout
from tsukimi.simulate.hosts import Hosts
from tsukimi.simulate.pool import SimulatedCache

Feed = Callable[[Any], None]


@dataclass(slots=True, frozen=True)
class Sizes:
    """Sizes of a layout, computed once."""

    block_tokens: int
    token_bytes: int
    block_bytes: int

    @classmethod
    def of(cls, layout: KVLayout) -> Sizes:
        return cls(layout.block_tokens, layout.token_bytes, layout.block_bytes)


class Outflow(ABC):
    """One attempt's bytes to one receiver. Parts become ready over time. `_arrived` is called once all have arrived."""

    def __init__(self, hosts: Hosts, source: str, target: str) -> None:
        self._network, self._links = hosts.network, hosts.links(source, target)
        self._timeline = hosts.timeline
        self._ready_bytes = 0.0
        self._flowing = False
        self._closed: Any = None

    def add(self, size_bytes: float) -> None:
        """More bytes are ready. They go with the next `flow` or `close`, or when the bytes under way have arrived."""
        self._ready_bytes += size_bytes

    def close(self, word: Any) -> None:
        """Nothing more comes. Call `_arrived(word)` when the last byte has arrived."""
        self.flow()
        if self._flowing:
            self._closed = word
        else:
            self._arrived(word)

    def flow(self) -> None:
        if self._ready_bytes and not self._flowing:
            size, self._ready_bytes, self._flowing = self._ready_bytes, 0.0, True
            self._network.start(self._timeline.now, self._links, size, self._flowed)

    def _flowed(self, _: Any) -> None:
        self._flowing = False
        if self._ready_bytes:
            self.flow()
        elif self._closed is not None:
            word, self._closed = self._closed, None
            self._arrived(word)

    @abstractmethod
    def _arrived(self, word: Any) -> None:
        """The last byte has arrived. `word` is what `close` was given."""


class Handoff(Outflow):
    """KV of one prompt on its way to the decode node."""

    def __init__(
        self, command: OpenHandoff, sizes: Sizes, hosts: Hosts, host: str, prefill: Feed, decode: Feed
    ) -> None:
        super().__init__(hosts, host, command.target.decode.host)
        self._attempt = command.attempt
        self._sizes = sizes
        self._prefill, self._decode = prefill, decode

    def computed(self, start: int, tokens: int) -> None:
        """A step over these positions begins."""
        self.add(tokens * self._sizes.token_bytes)
        self.flow()

    def send(self, first_block: int, blocks: int) -> None:
        self.add(blocks * self._sizes.block_bytes)

    def commit(self, command: CommitHandoff) -> None:
        self.close(
            LandingArrived(self._attempt, command.first_token, command.first_logprob, command.cached_tokens)
        )

    def abort(self) -> None:
        self.close(LandingFailed(self._attempt, "the writer gave up"))

    def _arrived(self, word: LandingArrived | LandingFailed) -> None:
        self._timeline.send(self._told, word)

    def _told(self, word: LandingArrived | LandingFailed) -> None:
        self._decode(word)
        self._prefill(HandoffEnded(self._attempt, isinstance(word, LandingArrived)))


class PoolWrite(Outflow):
    """Full blocks of one sequence on their way to a cache node that lacks them. Opening and committing take no time: in a
    live node they happen while data flows."""

    def __init__(
        self,
        command: OpenPoolWrite,
        sizes: Sizes,
        hosts: Hosts,
        host: str,
        worker: Feed,
        cache: SimulatedCache,
    ) -> None:
        super().__init__(hosts, host, cache.host)
        self._attempt = command.attempt
        self._first = command.first_block
        self._sizes = sizes
        self._worker, self._cache = worker, cache
        self._landing, wanted = cache.open_put(command.namespace, command.keys)
        self._wanted = list(wanted)
        """Indexes of the keys still to be sent, in growing order."""
        self._sent: list[int] = []

    def computed(self, start: int, tokens: int) -> None:
        """A step over these positions begins. The blocks that it completes are sent."""
        size = self._sizes.block_tokens
        first = start // size
        self.send(first, (start + tokens) // size - first)
        self.flow()

    def send(self, first_block: int, blocks: int) -> None:
        first = first_block - self._first
        wanted = self._wanted
        fresh = slice(bisect_left(wanted, first), bisect_left(wanted, first + blocks))
        self._sent += wanted[fresh]
        del wanted[fresh]
        self.add((fresh.stop - fresh.start) * self._sizes.block_bytes)

    def commit(self) -> None:
        self.close(True)

    def abort(self) -> None:
        self.close(False)

    def _arrived(self, whole: bool) -> None:
        stored = 0
        if whole:
            checksums = dict.fromkeys(self._sent, 0)
            stored = self._cache.commit_put(self._landing, checksums)
        else:
            self._cache.abort_put(self._landing)
        self._timeline.send(self._worker, PoolWriteEnded(self._attempt, stored))


class Fetch:
    """A run of blocks pulled from a cache node, which may have to wait until they are there."""

    def __init__(
        self,
        command: FetchBlocks,
        sizes: Sizes,
        hosts: Hosts,
        host: str,
        worker: Feed,
        cache: SimulatedCache,
    ) -> None:
        self._command = command
        self._sizes = sizes
        self._hosts, self._host = hosts, host
        self._timeline = hosts.timeline
        self._worker, self._cache = worker, cache
        self._began_s = hosts.timeline.now
        self._opened = False
        wait_s = patience_s(command.source)
        if not self._try() and wait_s > 0.0:
            cache.wait(self._try)
            self._timeline.at(self._began_s + wait_s, self._waited)
        elif not self._opened:
            self._open()

    def _try(self) -> bool:
        """Open the read if all blocks are there, or if it is too late to wait for them."""
        if not self._opened and self._cache.holds(self._command.namespace, self._command.keys):
            self._open()
        return self._opened

    def _waited(self, _: Any) -> None:
        if not self._opened:
            self._open()

    def _open(self) -> None:
        self._opened = True
        command = self._command
        self._began_s = self._timeline.now
        lease, blocks = self._cache.open_read(command.namespace, command.keys)
        if blocks:
            size_bytes = blocks * self._sizes.block_bytes
            self._hosts.start(self._cache.host, self._host, size_bytes, self._arrived, (lease, blocks))
        else:
            self._timeline.send(self._worker, self._fetched(0))

    def _arrived(self, what: tuple[int, int]) -> None:
        lease, blocks = what
        self._cache.close_read(lease)
        self._worker(self._fetched(blocks))

    def _fetched(self, blocks: int) -> BlocksFetched:
        command = self._command
        seconds = self._timeline.now - self._began_s
        error = "" if blocks == len(command.keys) else "not all blocks were there"
        return BlocksFetched(
            command.attempt, command.source.first_block, blocks, error, seconds, command.turn
        )
