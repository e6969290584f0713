"""How a client reaches a peer: which transport, and the handshake."""

from __future__ import annotations

from msgspec import Struct

from shared.dataplane.memory.home import Home
from shared.dataplane.transports.base import Connection, PeerLost, Transport
from shared.dataplane.wire.frames import Hello, Rejected, Welcome
from shared.dataplane.wire.hello import Identity
from shared.protocol.errors import Unavailable
from shared.protocol.ids import NodeRef


class Dialer(Struct, frozen=True):
    """Blocking and stateless: used by many threads at once."""

    identity: Identity
    home: Home
    host: str
    tcp: Transport
    shm: Transport | None
    hello_timeout_s: float

    def dial(self, target: NodeRef) -> Connection:
        """A connection to that very life of the target, by shared memory where both can, else by TCP. Raises PeerLost
        or another Unavailable when it cannot be reached, Refused when it speaks another layout or namespace."""
        problems = []
        for transport, address in self._ways(target):
            try:
                return self._greet(transport.connect(address), target)
            except PeerLost as e:
                problems.append(e.message)
        raise PeerLost(f"{target.node} cannot be reached: {'; '.join(problems) or 'it has no address'}")

    def _ways(self, target: NodeRef) -> list[tuple[Transport, str]]:
        ways: list[tuple[Transport, str]] = []
        if self.shm is not None and target.shm and target.host and target.host == self.host:
            ways.append((self.shm, target.shm))
        if target.tcp:
            ways.append((self.tcp, target.tcp))
        return ways

    def _greet(self, connection: Connection, target: NodeRef) -> Connection:
        me = self.identity
        try:
            connection.send(
                Hello(
                    node=me.node,
                    incarnation=me.incarnation,
                    target=target.node,
                    target_incarnation=target.incarnation,
                    layout=self.home.arena.layout,
                    namespace=me.namespace,
                )
            )
            answer = connection.receive(self.hello_timeout_s).message
        except BaseException:
            connection.close()
            raise
        if isinstance(answer, Welcome) and answer.incarnation == target.incarnation:
            return connection
        connection.close()
        if isinstance(answer, Rejected):
            raise answer.error.to_exception()
        raise Unavailable(f"{target.node} answered the handshake with {answer}")
