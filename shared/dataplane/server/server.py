"""Accepting connections: one Session each, from the handshake to the last frame."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from shared.dataplane.memory.arena import Arena
from shared.dataplane.memory.endpoint_memory import Home
from shared.dataplane.pool_backend import PoolBackend
from shared.dataplane.server.arrivals import Arrivals
from shared.dataplane.server.incoming import Incoming
from shared.dataplane.server.landing import LandingTable
from shared.dataplane.server.pool_server import PoolSession
from shared.dataplane.transports.base import Connection, Listener, PeerLost
from shared.dataplane.wire.connection import FramedConnection
from shared.dataplane.wire.counters import Counters
from shared.dataplane.wire.frames import (
    Abort,
    CloseRead,
    Commit,
    Hello,
    Message,
    OpenPut,
    OpenRead,
    OpenWrite,
    PutGranted,
    ReadGranted,
    Rejected,
    Welcome,
    Write,
)
from shared.dataplane.wire.framing import Frame
from shared.dataplane.wire.hello import Identity, judge
from shared.dataplane.wire.loop_calls import LoopCalls
from shared.protocol.errors import TsukimiError, Unavailable

MAX_SESSIONS = 512
QUEUE_LIMIT = 1024

log = structlog.get_logger()


class Serving:
    """What all sessions of an endpoint share."""

    def __init__(
        self, identity: Identity, home: Home, arrivals: Arrivals, counters: Counters, hello_timeout_s: float
    ) -> None:
        self.identity = identity
        self.home = home
        self.arrivals = arrivals
        self.counters = counters
        self.hello_timeout_s = hello_timeout_s
        self.table = LandingTable()
        self.backend: PoolBackend | None = None


class Session:
    def __init__(
        self, shared: Serving, calls: LoopCalls, connection: Connection, on_over: Callable[[Session], None]
    ) -> None:
        self._shared = shared
        self._calls = calls
        self._connection = connection
        self._on_over = on_over
        self.peer: Identity | None = None
        """Known once it has been welcomed."""
        self.link = FramedConnection(
            self._shake_hands,
            self._on_frame,
            self._on_lost,
            name=f"{shared.identity.node}-{connection.name}-in",
            queue_limit=QUEUE_LIMIT,
        )
        self.incoming = Incoming(shared.table, shared.arrivals, shared.counters, self._send)
        self._pool: PoolSession | None = None

    def cut(self) -> None:
        """Before the handshake is over the link knows no connection to cut."""
        self._connection.cut()

    def _shake_hands(self) -> Connection:
        try:
            self._welcome()
        except BaseException:
            self._connection.close()
            raise
        return self._connection

    def _welcome(self) -> None:
        connection, identity = self._connection, self._shared.identity
        hello = connection.receive(self._shared.hello_timeout_s).message
        if not isinstance(hello, Hello):
            raise PeerLost(f"began with {type(hello).__name__} instead of Hello")
        try:
            error = judge(hello, identity, self._shared.home.arena_for(hello.layout).layout)
        except TsukimiError as e:
            error = e
        if error is not None:
            self._shared.counters.add("connections_refused")
            log.warning("data_plane_peer_refused", peer=hello.node, error=error.message)
            connection.send(Rejected(error.to_wire()))
            raise error
        self.peer = Identity(hello.node, hello.incarnation, hello.namespace)
        self._shared.counters.add("connections_accepted")
        connection.send(Welcome(identity.node, identity.incarnation))

    def _on_frame(self, frame: Frame, connection: Connection) -> None:
        match frame.message:
            case Write() as message:
                self.incoming.write(message, self._arena, connection)
            case OpenWrite() as message:
                self.incoming.open_write(message)
            case Commit() as message:
                self.incoming.commit(message)
            case Abort() as message:
                self.incoming.abort(message)
            case OpenPut() as message:
                self._calls.soon(self._open_put, message)
            case OpenRead() as message:
                self._calls.soon(self._open_read, message)
            case CloseRead() as message:
                self._calls.soon(self._close_read, message)
            case message:
                raise PeerLost(f"{type(message).__name__} is not for a server")

    @property
    def _arena(self) -> Arena:
        return self._shared.home.arena

    def _open_put(self, message: OpenPut) -> None:
        pool = self._pool_session()
        if pool is None:
            self._send(PutGranted(message.stream, [], Unavailable("this node serves no pool").to_wire()))
        else:
            pool.open_put(message, self._arena)

    def _open_read(self, message: OpenRead) -> None:
        pool = self._pool_session()
        if pool is None:
            self._send(ReadGranted(message.read, [], Unavailable("this node serves no pool").to_wire()))
        else:
            pool.open_read(message, self._arena)

    def _close_read(self, message: CloseRead) -> None:
        if self._pool is not None:
            self._pool.close_read(message)

    def _pool_session(self) -> PoolSession | None:
        backend = self._shared.backend
        if self._pool is None and backend is not None:
            shared = self._shared
            self._pool = PoolSession(
                backend, shared.table, self.incoming, shared.counters, self._calls, self.link.post
            )
        return self._pool

    def _on_lost(self, error: TsukimiError) -> None:
        self.incoming.lost(error.message)
        self._calls.soon(self._lost_on_loop)
        self._on_over(self)

    def _lost_on_loop(self) -> None:
        if self._pool is not None:
            self._pool.lost()

    def _send(self, message: Message) -> None:
        self.link.post(lambda connection: connection.send(message))


class Server:
    """Accepts on every listener until closed."""

    def __init__(self, shared: Serving, calls: LoopCalls, listeners: list[Listener]) -> None:
        self._shared = shared
        self._calls = calls
        self._listeners = listeners
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._accept_for_ever, args=(listener,), name="data-plane-accept", daemon=True
            )
            for listener in listeners
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def sever_writer(self, incoming: object) -> None:
        """Cut the session whose streams these are."""
        with self._lock:
            sessions = [session for session in self._sessions if session.incoming is incoming]
        for session in sessions:
            session.link.sever(PeerLost("it wrote too slowly into a landing that was closed"))

    def forget(self, node: str, keep_incarnation: str) -> None:
        """Cut the sessions of other lives of the node."""
        with self._lock:
            sessions = [
                session
                for session in self._sessions
                if session.peer is not None
                and session.peer.node == node
                and session.peer.incarnation != keep_incarnation
            ]
        for session in sessions:
            session.link.sever(PeerLost("that life of the peer is over"))

    def close(self) -> None:
        """Blocks until every thread has ended. Idempotent."""
        self._closing = True
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.cut()
            session.link.sever(PeerLost("closed by the peer"))
        for session in sessions:
            session.link.join()

    def _accept_for_ever(self, listener: Listener) -> None:
        while not self._closing:
            try:
                connection = listener.accept()
            except PeerLost:
                return
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        session = Session(self._shared, self._calls, connection, self._on_over)
        with self._lock:
            full = len(self._sessions) >= MAX_SESSIONS
            if not full:
                self._sessions.add(session)
        if full:
            log.warning("data_plane_full", sessions=MAX_SESSIONS)
            connection.cut()
            connection.close()
        else:
            session.link.start()

    def _on_over(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)
        if session.peer is not None:
            self._shared.counters.add("connections_lost")
