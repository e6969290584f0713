"""The connections a client keeps: two at most to one life of a node, so that loads and stores do not queue behind
each other."""

from __future__ import annotations

import functools
import threading
from typing import Literal

from msgspec import Struct

from shared.dataplane.client.caller import Caller
from shared.dataplane.client.connecting import Dialer
from shared.dataplane.transports.base import Connection, PeerLost
from shared.dataplane.wire.counters import Counters
from shared.protocol.ids import Incarnation, NodeId, NodeRef

Purpose = Literal["write", "read"]
Life = tuple[NodeId, Incarnation, Purpose]


class PeerOptions(Struct, frozen=True):
    queue_limit: int
    stall_s: float


class Peers:
    """Thread-safe. A lost connection is replaced by the next `reach`, never behind anybody's back."""

    def __init__(self, dialer: Dialer, counters: Counters, options: PeerOptions) -> None:
        self._dialer = dialer
        self._counters = counters
        self._options = options
        self._lock = threading.Lock()
        self._callers: dict[Life, Caller] = {}
        self._leaving: set[Caller] = set()
        """Lost or forgotten, but not yet over."""
        self._closed = False

    def reach(self, target: NodeRef, purpose: Purpose) -> Caller:
        """The connection to that life of the target, at once; it may still be about to connect, or to fail to."""
        life = (target.node, target.incarnation, purpose)
        with self._lock:
            caller = self._callers.get(life)
            if caller is not None and caller.link.lost is not None:
                self._leaving.add(caller)
                caller = None
            if caller is None:
                caller = self._callers[life] = self._begin(target, purpose, life)
            return caller

    def forget(self, node: NodeId, keep_incarnation: Incarnation) -> None:
        with self._lock:
            lives = [life for life in self._callers if life[0] == node and life[1] != keep_incarnation]
            gone = [self._callers.pop(life) for life in lives]
            self._leaving.update(gone)
        for caller in gone:
            caller.link.sever(PeerLost("that life of the peer is over"))

    def close(self) -> None:
        """Blocks until every thread has ended. Idempotent."""
        with self._lock:
            self._closed = True
            callers = [*self._callers.values(), *self._leaving]
        for caller in callers:
            caller.link.sever(PeerLost("this end was closed"))
        for caller in callers:
            caller.link.join()

    def transports(self) -> dict[str, str]:
        """For people and tests: node -> transport of its live connections."""
        with self._lock:
            return {life[0]: c.link.transport for life, c in self._callers.items() if c.link.lost is None}

    def _begin(self, target: NodeRef, purpose: Purpose, life: Life) -> Caller:
        holder: list[Caller] = []
        caller = Caller(
            functools.partial(self._dial, target),
            name=f"{self._dialer.identity.node}-{target.node}-{purpose}",
            queue_limit=self._options.queue_limit,
            stall_s=self._options.stall_s,
            on_over=lambda: self._on_over(life, holder[0]),
        )
        holder.append(caller)
        if self._closed:
            caller.link.sever(PeerLost("this end was closed"))
        caller.link.start()
        return caller

    def _dial(self, target: NodeRef) -> Connection:
        connection = self._dialer.dial(target)
        self._counters.add("connections_opened")
        return connection

    def _on_over(self, life: Life, caller: Caller) -> None:
        self._counters.add("connections_lost")
        with self._lock:
            self._leaving.discard(caller)
            if self._callers.get(life) is caller:
                del self._callers[life]
