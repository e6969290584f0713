"""Endpoints for tests: real sockets and real memory, all in one process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from shared.dataplane.endpoint import Endpoint, EndpointOptions
from shared.dataplane.faults import Faults
from shared.dataplane.memory.arena import Arena, Order
from shared.dataplane.memory.endpoint_memory import Home
from shared.dataplane.pool_backend import PutGrant, ReadGrant
from shared.dataplane.transports.base import Timeouts
from shared.dataplane.wire.hello import Identity
from shared.protocol.ids import BlockKey, LandingId, new_incarnation
from shared.protocol.model import KVLayout
from tests.examples.transport import UnixTransport

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32", dtype_bytes=4)
NAMESPACE = b"n" * 16
TIMEOUTS = Timeouts(connect_s=2.0, stall_s=5.0)
HOSTS = {"tcp": "", "shm": "this-machine", "unix": "this-machine"}
"""Transport -> the host identity with which endpoints choose that transport."""


class Site:
    """One node's endpoint and its arena."""

    def __init__(self, arena: Arena, endpoint: Endpoint) -> None:
        self.arena = arena
        self.endpoint = endpoint

    def fill(self, page: int) -> bytes:
        """Random bytes for a whole page; returns them."""
        size = self.arena.layout.slice_bytes
        block = os.urandom(self.arena.layout.block_bytes)
        for layer in range(self.arena.layout.layers):
            self.arena.slice(page, layer)[:] = block[layer * size : (layer + 1) * size]
        return block

    def read(self, page: int) -> bytes:
        return b"".join(bytes(self.arena.slice(page, layer)) for layer in range(self.arena.layout.layers))


@asynccontextmanager
async def site(
    node: str,
    transport: str,
    *,
    layout: KVLayout = LAYOUT,
    pages: int = 16,
    order: Order = "layer",
    incarnation: str = "",
    namespace: bytes = b"",
    faults: Faults | None = None,
    timeouts: Timeouts = TIMEOUTS,
    queue_limit: int = 1024,
) -> AsyncIterator[Site]:
    arena = Arena(layout, pages, order)
    identity = Identity(node, incarnation or new_incarnation(), namespace)
    options = EndpointOptions(
        host=HOSTS[transport],
        timeouts=timeouts,
        fence_wait_s=0.2,
        queue_limit=queue_limit,
        transports=(UnixTransport,) if transport == "unix" else (),
    )
    endpoint = Endpoint(identity, Home(arena.memory, arena), options, faults=faults)
    async with AsyncExitStack() as stack:
        stack.callback(arena.close)
        stack.push_async_callback(endpoint.close)
        await endpoint.start()
        yield Site(arena, endpoint)


class DictPool:
    """The smallest correct PoolBackend: no eviction, no expiry."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))
        self.held: dict[tuple[bytes, BlockKey], tuple[int, int]] = {}
        self.puts: dict[LandingId, dict[int, tuple[tuple[bytes, BlockKey], int]]] = {}
        self.leases: set[int] = set()
        self.reads_granted = 0
        self._numbers = itertools.count(1)

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> PutGrant:
        wanted = [i for i, key in enumerate(keys) if (namespace, key) not in self.held][: len(self.free)]
        pages = [self.free.pop() for _ in wanted]
        landing = next(self._numbers).to_bytes(16, "little")
        if wanted:
            self.puts[landing] = {
                i: ((namespace, keys[i]), page) for i, page in zip(wanted, pages, strict=True)
            }
        return PutGrant(landing, tuple(wanted), tuple(pages))

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        stored = 0
        for i, (key, page) in self.puts.pop(landing, {}).items():
            if i in checksums and key not in self.held:
                self.held[key] = (page, checksums[i])
                stored += 1
            else:
                self.free.append(page)
        return stored

    def abort_put(self, landing: LandingId) -> None:
        self.free += [page for _, page in self.puts.pop(landing, {}).values()]

    def open_read(self, namespace: bytes, keys: Sequence[BlockKey], patience_s: float = 0.0) -> ReadGrant:
        run = list(
            itertools.takewhile(lambda held: held is not None, (self.held.get((namespace, k)) for k in keys))
        )
        lease = next(self._numbers)
        self.leases.add(lease)
        self.reads_granted += 1
        blocks = [held for held in run if held is not None]
        return ReadGrant(lease, tuple(page for page, _ in blocks), tuple(checksum for _, checksum in blocks))

    def close_read(self, lease: int) -> None:
        self.leases.discard(lease)


async def eventually(holds: Callable[[], bool], what: str = "", within_s: float = 10.0) -> None:
    """Wait until `holds()` is true. After `within_s` seconds, raise an AssertionError that names `what`."""
    try:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never came true: {what or holds}") from None
