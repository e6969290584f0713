"""A cache node's decisions: who may write which blocks, what can be read, and what is evicted when room is needed.

Blocks are immutable and stored only if absent: a key that is here, or is being written under a live lease, is not wanted
again. Nothing ever waits for room. A put gets the pages that are available at once, and a read pins only blocks that are
here. Open puts and open reads may each hold at most their share of the pages, so neither can starve the other.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

from shared.core.cache import events as c
from shared.core.cache.config import CacheConfig
from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.core.kv.block_keys import KEY_BYTES
from shared.core.kv.eviction import POLICIES
from shared.core.kv.pool import BlockPool
from shared.core.machine import Command, Ticked
from shared.protocol.ids import BlockKey, LandingId

CacheEvent = (
    c.ArenaLaidOut | c.PutOpened | c.PutProgressed | c.PutCommitted | c.PutAborted | c.PutFenced
    | c.ReadOpened | c.ReadClosed | Ticked | SnapshotWanted
)  # fmt: skip
CacheCommand = c.GrantPut | c.ConfirmPut | c.FencePut | c.GrantRead | PublishBlocks | PublishSnapshot

T = TypeVar("T")

COUNTERS = (
    "puts", "puts_aborted", "puts_expired", "blocks_offered", "blocks_stored", "blocks_evicted", "blocks_refused",
    "reads", "reads_expired", "blocks_asked", "blocks_served",
)  # fmt: skip
"""Monotonic totals. blocks_refused counts wanted blocks for which there was no room."""


@dataclass(slots=True, eq=False)
class _Put:
    wanted: tuple[int, ...]
    """Indexes into `offered` of the blocks to write."""
    pages: list[int]
    keys: tuple[BlockKey, ...]
    """Pool keys of the blocks to write."""
    offered: tuple[BlockKey, ...]
    """Pool keys of all blocks offered."""
    expires_at: float
    fencing: bool = False
    """Its lease is over. The pages are released once no thread writes into them."""


@dataclass(slots=True, eq=False)
class _Read:
    pages: list[int]
    expires_at: float


class CacheMachine:
    """Implements Machine[CacheEvent]. A pool key is namespace + block key, so that namespaces never share a block. Keys
    of the first namespace seen, usually the only one, are used without a prefix."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._lay_out(config.pages)
        self._puts: dict[LandingId, _Put] = {}
        self._reads: dict[c.Lease, _Read] = {}
        self._coming: dict[BlockKey, LandingId] = {}
        """Pool key -> the live put that is writing it."""
        self._home: bytes | None = None
        """The first namespace seen. Its pool keys have no prefix."""
        self._strangers = False
        """Whether other namespaces have been seen too."""
        self._put_pages = 0
        self._read_pins = 0
        self._seq = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._handlers: dict[type, Callable[[Any, float], list[Command]]] = {
            c.PutOpened: self._open_put,
            c.PutProgressed: lambda event, now: self._renew(event.landings, now),
            c.PutCommitted: lambda event, now: self._commit_put(event),
            c.PutAborted: lambda event, now: self._abort_put(event.landing),
            c.PutFenced: lambda event, now: self._drop_put(event.landing),
            c.ReadOpened: self._open_read,
            c.ReadClosed: lambda event, now: self._close_read(event.lease),
            Ticked: lambda event, now: self._expire(now),
            SnapshotWanted: lambda event, now: self._snapshot(),
            c.ArenaLaidOut: lambda event, now: self._arena_laid_out(event.pages),
        }

    @property
    def blocks_seq(self) -> int:
        """Sequence number of the last PublishBlocks."""
        return self._seq

    @property
    def open_puts(self) -> tuple[LandingId, ...]:
        return tuple(landing for landing, put in self._puts.items() if not put.fencing)

    def handle(self, event: CacheEvent, now: float) -> list[Command]:
        commands = self._handlers[type(event)](event, now)
        if self.pool.changed:
            commands += self._changes()
        return commands

    # -- puts ----------------------------------------------------------------------------------------------------------

    def _open_put(self, event: c.PutOpened, now: float) -> list[Command]:
        counters = self.counters
        counters["puts"] += 1
        counters["blocks_offered"] += len(event.keys)
        if event.landing in self._puts:
            return [c.GrantPut(event.landing, (), ())]
        full = self._pool_keys(event.namespace, event.keys)
        here = self.pool.match(full)  # held while making room, so that a put never evicts its own prefix
        coming, content = self._coming, self.pool.content
        lacking: Sequence[int] = range(len(here), len(full))
        rest = full[len(here) :]
        if not (content.isdisjoint(rest) and coming.keys().isdisjoint(rest)):
            lacking = [i for i in lacking if full[i] not in coming and full[i] not in content]
        share = int(self.pool.total * self.config.put_share) - self._put_pages
        pages = self.pool.allocate(max(0, min(len(lacking), share, self.pool.available))) or []
        self.pool.unpin(here)
        counters["blocks_refused"] += len(lacking) - len(pages)
        if not pages:
            return [c.GrantPut(event.landing, (), ())]
        wanted = tuple(lacking[: len(pages)])
        keys = _picked(full, wanted)
        for key in keys:
            coming[key] = event.landing
        self._put_pages += len(pages)
        self._puts[event.landing] = _Put(wanted, pages, keys, full, now + self.config.put_lease_s)
        return [c.GrantPut(event.landing, wanted, tuple(pages))]

    def _renew(self, landings: Iterable[LandingId], now: float) -> list[Command]:
        for landing in landings:
            put = self._puts.get(landing)
            if put is not None and not put.fencing:
                put.expires_at = now + self.config.put_lease_s
        return []

    def _commit_put(self, event: c.PutCommitted) -> list[Command]:
        put = self._puts.get(event.landing)
        if put is None or put.fencing:
            return [c.ConfirmPut(event.landing, 0)]
        pages, keys, wanted = put.pages, put.keys, put.wanted
        known, told = self._checksums, event.checksums
        came = [i in told for i in wanted]
        if not all(came):
            pages, keys = list(compress(pages, came)), tuple(compress(keys, came))
            wanted = tuple(compress(wanted, came))
        for page, i in zip(pages, wanted, strict=True):
            known[page] = told[i]
        stored = 0
        for start, end in _stretches(wanted):
            first = wanted[start]
            parent = put.offered[first - 1] if first else None
            stored += self.pool.register_chain(pages[start:end], keys[start:end], parent)
        self.counters["blocks_stored"] += stored
        self._drop_put(event.landing)
        return [c.ConfirmPut(event.landing, stored)]

    def _abort_put(self, landing: LandingId) -> list[Command]:
        if landing in self._puts:
            self.counters["puts_aborted"] += 1
        return self._drop_put(landing)

    def _drop_put(self, landing: LandingId) -> list[Command]:
        put = self._puts.pop(landing, None)
        if put is not None:
            if not put.fencing:
                self._stop_coming(put)
            self._put_pages -= len(put.pages)
            self.pool.unpin(put.pages)
        return []

    def _stop_coming(self, put: _Put) -> None:
        coming = self._coming
        for key in put.keys:
            coming.pop(key, None)  # a put may name a block twice

    # -- reads ---------------------------------------------------------------------------------------------------------

    def holds(self, namespace: bytes, keys: tuple[BlockKey, ...]) -> bool:
        """Whether a read of these would find them all now."""
        return self.pool.peek(self._pool_keys(namespace, keys)) == len(keys)

    def _open_read(self, event: c.ReadOpened, now: float) -> list[Command]:
        counters = self.counters
        counters["reads"] += 1
        counters["blocks_asked"] += len(event.keys)
        room = max(0, int(self.pool.total * self.config.read_share) - self._read_pins)
        pages: list[int] = []
        if event.lease not in self._reads:
            pages = self.pool.match(self._pool_keys(event.namespace, event.keys[:room]))
        if pages:
            self._read_pins += len(pages)
            self._reads[event.lease] = _Read(pages, now + self.config.read_lease_s)
            counters["blocks_served"] += len(pages)
        return [c.GrantRead(event.lease, tuple(pages), tuple([self._checksums[page] for page in pages]))]

    def _close_read(self, lease: c.Lease) -> list[Command]:
        read = self._reads.pop(lease, None)
        if read is not None:
            self._read_pins -= len(read.pages)
            self.pool.unpin(read.pages)
        return []

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> list[Command]:
        for lease in [lease for lease, read in self._reads.items() if read.expires_at <= now]:
            self.counters["reads_expired"] += 1
            self._close_read(lease)
        late = {k: put for k, put in self._puts.items() if put.expires_at <= now and not put.fencing}
        for put in late.values():
            self.counters["puts_expired"] += 1
            put.fencing = True
            self._stop_coming(put)
        return [c.FencePut(landing) for landing in late]

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _changes(self) -> list[Command]:
        stored, removed = self.pool.take_changes()
        self.counters["blocks_evicted"] += len(removed)
        step = self.config.publish_keys
        commands: list[Command] = []
        for first in range(0, max(len(stored), len(removed)), step):
            self._seq += 1
            part = slice(first, first + step)
            commands.append(
                PublishBlocks(self._seq, self._block_keys(stored[part]), self._block_keys(removed[part]))
            )
        return commands

    def _snapshot(self) -> list[Command]:
        return [PublishSnapshot(self._seq, self._block_keys(self.pool.keys()))]

    def _arena_laid_out(self, pages: int) -> list[Command]:
        if not self.pool.total:
            self._lay_out(pages)
        return []

    def _lay_out(self, pages: int) -> None:
        self.pool = BlockPool(pages, POLICIES[self.config.eviction])
        self._checksums = array.array("Q", bytes(8 * pages))

    def _pool_keys(self, namespace: bytes, keys: tuple[BlockKey, ...]) -> tuple[bytes, ...]:
        if self._home is None:
            self._home = namespace
        if namespace == self._home:
            return keys
        self._strangers = True
        return tuple([namespace + key for key in keys])

    def _block_keys(self, pool_keys: tuple[bytes, ...]) -> tuple[BlockKey, ...]:
        return tuple([key[-KEY_BYTES:] for key in pool_keys]) if self._strangers else pool_keys

    def check(self) -> None:
        self.pool.check()
        put_pages = [page for put in self._puts.values() for page in put.pages]
        assert len(set(put_pages)) == len(put_pages), "two puts write into one page"
        assert len(put_pages) == self._put_pages, (
            f"{self._put_pages} pages of puts counted, {len(put_pages)} found"
        )
        assert all(self.pool.refs_of(page) == 1 for page in put_pages), "a page of a put is shared or free"
        assert all(self.pool.key_of(page) is None for page in put_pages), "a page of an open put can be read"
        pins = [page for read in self._reads.values() for page in read.pages]
        assert len(pins) == self._read_pins, f"{self._read_pins} pins of reads counted, {len(pins)} found"
        assert all(self.pool.key_of(page) is not None for page in pins), "a read holds a page without a key"
        held = set(put_pages) | set(pins)
        assert self.pool.held == len(held), (
            f"{self.pool.held} pages held, but puts and reads know of {len(held)}"
        )
        coming = {key: landing for landing, put in self._puts.items() if not put.fencing for key in put.keys}
        assert coming == self._coming, "keys being written and open puts disagree"


def _picked(items: tuple[T, ...], places: tuple[int, ...]) -> tuple[T, ...]:
    """The items at `places`, which ascend. Usually they are contiguous, so a slice is enough."""
    first, last = places[0], places[-1]
    if last - first < len(places):
        return items[first : last + 1]
    return tuple([items[i] for i in places])


def _stretches(places: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Index ranges (start, end) into `places`, which ascend, of contiguous places. Usually there is just one range."""
    start = 0
    if places and places[-1] - places[0] >= len(places):
        for i in range(1, len(places)):
            if places[i] != places[i - 1] + 1:
                yield start, i
                start = i
    if places:
        yield start, len(places)
