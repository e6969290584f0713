"""The transports there are. To add one: a file with a class, and a line here (or `module:Class` of a user's own)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.dataplane.transports.base import Setup, Transport
from shared.dataplane.transports.shm import ShmTransport
from shared.dataplane.transports.tcp import TcpTransport


class TransportClass(Protocol):
    def make(self, setup: Setup) -> Transport | None:
        """The transport of one process; None where it cannot work. Cheap: opens nothing yet."""
        ...


TRANSPORTS: dict[str, TransportClass] = {"shm": ShmTransport, "tcp": TcpTransport}
"""By scheme, the preferred first."""


def transports_for(
    setup: Setup, own: Sequence[TransportClass] = (), without: Sequence[str] = ()
) -> list[Transport]:
    """Those of a process in order of preference: the user's own, then the registered ones but for `without`."""
    built_in = [kind for scheme, kind in TRANSPORTS.items() if scheme not in without]
    made = [kind.make(setup) for kind in (*own, *built_in)]
    return [transport for transport in made if transport is not None]
