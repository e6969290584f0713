"""The DataPlane of api.py: one endpoint a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import Struct

from shared.dataplane.api import FetchResult, LandingCommit, LandingStats
from shared.dataplane.client.connecting import Dialer
from shared.dataplane.client.fetching import Fetch
from shared.dataplane.client.outgoing import OutgoingPut, OutgoingStream
from shared.dataplane.client.peers import PeerOptions, Peers
from shared.dataplane.faults import Faults
from shared.dataplane.memory.arena import Arena
from shared.dataplane.memory.endpoint_memory import Home
from shared.dataplane.pool_backend import PoolBackend
from shared.dataplane.server.arrivals import Arrivals
from shared.dataplane.server.handoffs import HandoffEnding, Handoffs
from shared.dataplane.server.server import Server, Serving
from shared.dataplane.transports.base import Setup, Timeouts
from shared.dataplane.transports.registry import TransportClass, transports_for
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.hello import Identity
from shared.dataplane.wire.loop_calls import LoopCalls
from shared.protocol.errors import Invalid, TsukimiError, Unavailable
from shared.protocol.ids import BlockKey, LandingId, NodeRef, node_ref


class EndpointOptions(Struct, frozen=True, kw_only=True):
    host: str = ""
    """Which machine this is; peers on an equal one may use shared memory. Empty: never."""
    bind: str = "127.0.0.1"
    advertise: str = ""
    """Where peers connect to; empty: bind."""
    shm: bool = True
    """Whether shared memory is used with peers of the same machine."""
    transports: tuple[TransportClass, ...] = ()
    """Further transports, preferred to the built-in ones."""
    timeouts: Timeouts = Timeouts()
    fence_wait_s: float = 0.5
    """How long a writer may still be in the middle of something when its landing is closed, before it is cut off."""
    queue_limit: int = 1024
    """Writes waiting to be sent over one connection."""


class Endpoint:
    """Implements DataPlane. Everything public is for the event loop's thread, unless api.py says otherwise."""

    def __init__(
        self,
        identity: Identity,
        home: Home,
        options: EndpointOptions | None = None,
        *,
        faults: Faults | None = None,
    ) -> None:
        options = options if options is not None else EndpointOptions()
        self._identity = identity
        self._home = home
        self._options = options
        self._counters = Counters()
        self._arrivals = Arrivals(self._counters, faults)
        timeouts = options.timeouts
        setup = Setup(home.memory, timeouts, options.host, options.bind, options.advertise)
        self._transports = transports_for(setup, options.transports, () if options.shm else ("shm",))
        self._serving = Serving(identity, home, self._arrivals, self._counters, timeouts.connect_s)
        dialer = Dialer(identity, home, self._transports, timeouts.connect_s)
        self._peers = Peers(dialer, self._counters, PeerOptions(options.queue_limit, timeouts.stall_s))
        self._ref = NodeRef(identity.node, identity.incarnation)
        self._server: Server | None = None
        self._handoffs: Handoffs | None = None

    @property
    def ref(self) -> NodeRef:
        return self._ref

    async def start(self) -> None:
        """Listens. Raises OSError if it cannot, Invalid if a transport's device is not there."""
        calls = LoopCalls(asyncio.get_running_loop())
        listeners = {}
        for transport in self._transports:
            transport.register_memory()
            listeners[transport.name] = transport.listen()
        addresses = {scheme: listener.address for scheme, listener in listeners.items()}
        self._ref = node_ref(self._identity.node, self._identity.incarnation, self._options.host, addresses)
        self._handoffs = Handoffs(self._serving.table, calls)
        self._server = Server(self._serving, calls, list(listeners.values()))
        self._server.start()

    async def close(self) -> None:
        server = self._server
        await asyncio.to_thread(self._peers.close)
        if server is not None:
            await asyncio.to_thread(server.close)
        for transport in self._transports:
            transport.release_memory()

    def open_landing(
        self, landing: LandingId, pages: Sequence[int], on_commit: Callable[[LandingCommit], None]
    ) -> None:
        if self._handoffs is None:
            raise Unavailable("the data plane has not been started")
        self._handoffs.open(landing, pages, self._home.arena.layout.layers, on_commit)

    async def close_landing(self, landing: LandingId) -> None:
        found = self._serving.table.get(landing)
        if found is None:
            return
        if isinstance(found.ending, HandoffEnding):
            found.ending.abandoned = True
        found.fence.close()
        if not await found.fence.wait_quiet(self._options.fence_wait_s) and self._server is not None:
            self._server.sever_writer(found.writer)
            await found.fence.wait_quiet()
        self._serving.table.remove(landing)

    def landing_stats(self, landing: LandingId) -> LandingStats | None:
        return self._handoffs.stats(landing) if self._handoffs is not None else None

    def serve_pool(self, backend: PoolBackend) -> None:
        self._serving.backend = backend

    async def fetch(
        self,
        source: NodeRef,
        namespace: bytes,
        keys: Sequence[BlockKey],
        pages: Sequence[int],
        patience_s: float = 0.0,
    ) -> FetchResult:
        if len(keys) != len(pages):
            raise Invalid(f"{len(keys)} keys, but {len(pages)} pages to put their blocks into")
        if not keys:
            return FetchResult(0)
        caller = self._peers.reach(source, "read")
        fetch = Fetch(caller, self._home.arena, pages, self._arrivals, self._counters)
        return await fetch.run(namespace, keys, self._options.fence_wait_s, patience_s)

    def open_write(self, target: NodeRef, landing: LandingId) -> OutgoingStream:
        stream = OutgoingStream(self._peers.reach(target, "write"), self._home.arena, self._counters)
        stream.open(landing)
        return stream

    async def open_put(self, target: NodeRef, namespace: bytes, keys: Sequence[BlockKey]) -> OutgoingPut:
        put = OutgoingPut(self._peers.reach(target, "write"), self._home.arena, self._counters)
        try:
            await put.offer(namespace, keys)
        except TsukimiError as e:
            if e.code in ("refused", "overloaded"):
                raise
            raise Unavailable(f"{target.node} takes no blocks: {e.message}") from e
        return put

    def forget(self, node: str, keep_incarnation: str = "") -> None:
        self._peers.forget(node, keep_incarnation)
        if self._server is not None:
            self._server.forget(node, keep_incarnation)

    def counters(self) -> dict[str, float]:
        return self._counters.snapshot()

    def transports(self) -> dict[str, str]:
        """Node -> name of the transport in use to it, of live connections this end opened."""
        return self._peers.transports()


def endpoint(
    identity: Identity, arena: Arena, options: EndpointOptions | None = None, *, faults: Faults | None = None
) -> Endpoint:
    """Of a node that has its pages: prefill and decode."""
    return Endpoint(identity, Home(arena.memory, arena), options, faults=faults)
