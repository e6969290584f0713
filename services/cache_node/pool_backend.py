"""Puts the data plane's questions to the machine. The machine answers within the call that feeds the event."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from shared.core.cache import events as c
from shared.core.cache.machine import CacheEvent
from shared.core.kv.block_keys import KEY_BYTES
from shared.dataplane.pool_backend import PutGrant, ReadGrant
from shared.protocol.errors import Invalid, Unavailable
from shared.protocol.ids import BlockKey, LandingId

Answer = c.GrantPut | c.ConfirmPut | c.GrantRead


class MachineBackend:
    """Implements PoolBackend. Must not be called while the machine's commands are carried out; data planes never do."""

    def __init__(self, feed: Callable[[CacheEvent], None]) -> None:
        self._feed = feed
        self._leases = itertools.count(1)
        self._answer: Answer | None = None
        self.closed = False
        """Grant nothing new from now on."""

    def answer(self, command: Answer) -> None:
        """Carry out the commands by which the machine answers."""
        self._answer = command

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> PutGrant:
        grant = self._ask(c.PutOpened(secrets.token_bytes(16), namespace, _block_keys(keys)), c.GrantPut)
        return PutGrant(grant.landing, grant.wanted, grant.pages)

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        return int(self._ask(c.PutCommitted(landing, checksums), c.ConfirmPut).stored)

    def abort_put(self, landing: LandingId) -> None:
        self._feed(c.PutAborted(landing))

    def open_read(self, namespace: bytes, keys: Sequence[BlockKey]) -> ReadGrant:
        grant = self._ask(c.ReadOpened(next(self._leases), namespace, _block_keys(keys)), c.GrantRead)
        return ReadGrant(grant.lease, grant.pages, grant.checksums)

    def close_read(self, lease: int) -> None:
        self._feed(c.ReadClosed(lease))

    def _ask(self, event: CacheEvent, expected: type[Any]) -> Any:
        if self.closed and not isinstance(event, c.PutCommitted):
            raise Unavailable("this cache node is going away")
        self._answer = None
        self._feed(event)
        answer = self._answer
        assert isinstance(answer, expected), f"{type(event).__name__} was answered with {answer}"
        return answer


def _block_keys(keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
    """The machine can tell namespaces apart because all keys have the same length."""
    if any(len(key) != KEY_BYTES for key in keys):
        raise Invalid(f"block keys have {KEY_BYTES} bytes", param="keys")
    return tuple(keys)
