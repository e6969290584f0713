"""Puts the data plane's questions to the machine. The machine answers within the call that feeds the event."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shared.core.cache import events as c
from shared.core.cache.machine import CacheEvent
from shared.core.kv.block_keys import KEY_BYTES
from shared.dataplane.pool_backend import PutGrant, ReadGrant
from shared.protocol.errors import Invalid, Unavailable
from shared.protocol.ids import BlockKey, LandingId

Reader = tuple[bytes, tuple[BlockKey, ...], "asyncio.Future[ReadGrant]"]
"""Who waits for which blocks of which namespace."""
Answer = c.GrantPut | c.ConfirmPut | c.GrantRead


class MachineBackend:
    """Implements PoolBackend. Must not be called while the machine's commands are carried out; data planes never do."""

    def __init__(
        self, feed: Callable[[CacheEvent], None], holds: Callable[[bytes, tuple[BlockKey, ...]], bool]
    ) -> None:
        """`holds`: CacheMachine.holds."""
        self._feed = feed
        self._holds = holds
        self._readers: list[Reader] = []
        self._leases = itertools.count(1)
        self._answer: Answer | None = None
        self.closed = False

    def close(self) -> None:
        """Grant nothing new from now on. Readers that wait for blocks are told at once."""
        self.closed = True
        readers, self._readers = self._readers, []
        for _, _, granted in readers:
            granted.set_exception(going_away())

    def answer(self, command: Answer) -> None:
        """Carry out the commands by which the machine answers."""
        self._answer = command

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> PutGrant:
        grant = self._ask(c.PutOpened(secrets.token_bytes(16), namespace, _block_keys(keys)), c.GrantPut)
        return PutGrant(grant.landing, grant.wanted, grant.pages)

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        stored = int(self._ask(c.PutCommitted(landing, checksums), c.ConfirmPut).stored)
        if stored and self._readers:
            self._grant_readers()
        return stored

    def abort_put(self, landing: LandingId) -> None:
        self._feed(c.PutAborted(landing))

    def open_read(
        self, namespace: bytes, keys: Sequence[BlockKey], patience_s: float = 0.0
    ) -> ReadGrant | Awaitable[ReadGrant]:
        """A patient reader of blocks that are not all here is answered by the commit that completes them."""
        wanted = _block_keys(keys)
        if patience_s > 0.0 and not self.closed and not self._holds(namespace, wanted):
            return self._read_later(namespace, wanted, patience_s)
        return self._read(namespace, wanted)

    def close_read(self, lease: int) -> None:
        self._feed(c.ReadClosed(lease))

    def _read(self, namespace: bytes, keys: tuple[BlockKey, ...]) -> ReadGrant:
        grant = self._ask(c.ReadOpened(next(self._leases), namespace, keys), c.GrantRead)
        return ReadGrant(grant.lease, grant.pages, grant.checksums)

    async def _read_later(self, namespace: bytes, keys: tuple[BlockKey, ...], patience_s: float) -> ReadGrant:
        reader: Reader = (namespace, keys, asyncio.get_running_loop().create_future())
        self._readers.append(reader)
        granted = reader[2]
        await asyncio.wait({granted}, timeout=patience_s)
        if granted.done():
            return granted.result()
        self._readers.remove(reader)
        return self._read(namespace, keys)

    def _grant_readers(self) -> None:
        """Those whose blocks are all here. They are pinned now: by the time the reader's turn comes they could be
        gone."""
        waiting, self._readers = self._readers, []
        for reader in waiting:
            namespace, keys, granted = reader
            if self._holds(namespace, keys):
                granted.set_result(self._read(namespace, keys))
            else:
                self._readers.append(reader)

    def _ask(self, event: CacheEvent, expected: type[Any]) -> Any:
        if self.closed and not isinstance(event, c.PutCommitted):
            raise going_away()
        self._answer = None
        self._feed(event)
        answer = self._answer
        assert isinstance(answer, expected), f"{type(event).__name__} was answered with {answer}"
        return answer


def going_away() -> Unavailable:
    return Unavailable("this cache node is going away")


def _block_keys(keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
    """The machine can tell namespaces apart because all keys have the same length."""
    if any(len(key) != KEY_BYTES for key in keys):
        raise Invalid(f"block keys have {KEY_BYTES} bytes", param="keys")
    return tuple(keys)
