"""A cache node in simulated time: does what its shell does, without the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.core.cache.config import CacheConfig
from shared.core.cache.events import (
    ConfirmPut,
    GrantPut,
    GrantRead,
    PutAborted,
    PutCommitted,
    PutOpened,
    ReadClosed,
    ReadOpened,
)
from shared.core.cache.machine import CacheMachine
from shared.core.kv.block_events import PublishBlocks, PublishSnapshot, SnapshotWanted
from shared.protocol.cluster import NodeInfo, NodeLoad
from shared.protocol.ids import BlockKey, LandingId, NodeRef
from tsukimi.simulate.timeline import Timeline

_PUBLISHED = frozenset({PublishBlocks, PublishSnapshot})
Publish = Callable[[NodeRef, PublishBlocks | PublishSnapshot], None]


class SimulatedCache:
    """Feeds a CacheMachine. Its answers are returned within the call, as by the endpoint of a live node."""

    def __init__(self, ref: NodeRef, pages: int, timeline: Timeline, publish: Publish) -> None:
        self.ref = ref
        self.host = ref.host
        self.machine = CacheMachine(CacheConfig(pages=pages))
        self._timeline = timeline
        self._publish = publish
        self._names = 0
        self._waiters: list[Callable[[], bool]] = []
        """Readers of blocks that are not there yet. One that returns True has what it waited for."""
        self._reports = 0

    def info(self) -> NodeInfo:
        return NodeInfo(ref=self.ref, role="cache", stage="ready", kv_blocks=self.machine.pool.total)

    def load(self) -> NodeLoad:
        pool = self.machine.pool
        self._reports += 1
        return NodeLoad(
            node=self.ref.node,
            incarnation=self.ref.incarnation,
            role="cache",
            seq=self._reports,
            stage="ready",
            kv_blocks=pool.total,
            kv_blocks_held=pool.held,
            kv_blocks_cached=pool.cached,
            block_events_seq=self.machine.blocks_seq,
        )

    def feed(self, event: Any) -> Any:
        """Feed the event and return its answer, if it has one."""
        answer = None
        command: Any
        for command in self.machine.handle(event, self._timeline.now):
            if type(command) in _PUBLISHED:
                self._publish(self.ref, command)
            else:
                answer = command
        return answer

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> tuple[LandingId, tuple[int, ...]]:
        landing = self._name().to_bytes(16, "little")
        grant: GrantPut = self.feed(PutOpened(landing, namespace, tuple(keys)))
        return landing, grant.wanted

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        confirmed: ConfirmPut = self.feed(PutCommitted(landing, checksums))
        if self._waiters and confirmed.stored:
            self._waiters = [waiter for waiter in self._waiters if not waiter()]
        return confirmed.stored

    def holds(self, namespace: bytes, keys: tuple[BlockKey, ...]) -> bool:
        return self.machine.holds(namespace, keys)

    def wait(self, waiter: Callable[[], bool]) -> None:
        """Call the waiter whenever blocks were stored, until it returns True."""
        self._waiters.append(waiter)

    def abort_put(self, landing: LandingId) -> None:
        self.feed(PutAborted(landing))

    def open_read(self, namespace: bytes, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """(lease, number of blocks from the first on)."""
        lease = self._name()
        grant: GrantRead = self.feed(ReadOpened(lease, namespace, tuple(keys)))
        return lease, len(grant.pages)

    def close_read(self, lease: int) -> None:
        self.feed(ReadClosed(lease))

    def asked_snapshot(self) -> None:
        self.feed(SnapshotWanted())

    def _name(self) -> int:
        self._names += 1
        return self._names
