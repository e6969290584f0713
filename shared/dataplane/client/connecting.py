"""How a client reaches a peer: which transport, and the handshake."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shared.dataplane.memory.endpoint_memory import Home
from shared.dataplane.transports.base import Connection, PeerLost, Transport
from shared.dataplane.wire.frames import Hello, Rejected, Welcome
from shared.dataplane.wire.hello import Identity
from shared.protocol.errors import Unavailable
from shared.protocol.ids import NodeRef


class Dialer(Struct, frozen=True):
    """Blocking and stateless: used by many threads at once."""

    identity: Identity
    home: Home
    transports: Sequence[Transport]
    """The preferred first."""
    hello_timeout_s: float

    def dial(self, target: NodeRef) -> Connection:
        """A connection to that very life of the target, by the first transport that both have and that gets there.

        Raises PeerLost or another Unavailable when it cannot be reached, Refused when it speaks another layout or
        namespace."""
        problems = []
        for transport, address in self._ways(target):
            try:
                return self._greet(transport.connect(address), target)
            except PeerLost as e:
                problems.append(e.message)
        raise PeerLost(f"{target.node} cannot be reached: {'; '.join(problems) or 'it has no address'}")

    def _ways(self, target: NodeRef) -> list[tuple[Transport, str]]:
        return [
            (transport, address)
            for transport in self.transports
            if (address := target.address(transport.name)) and transport.reaches(target.host)
        ]

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
