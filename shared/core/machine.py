"""What a role's decisions look like: events in, commands out, time as an argument.

The live driver (io.driver) and the simulator feed the same machines. Events and commands are frozen msgspec
structs, so a recorded run can be replayed and must give identical commands.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from msgspec import Struct

Ask = int
"""A question that a shell is waiting to have answered; opaque to machines, echoed in the reply command."""


class Event(Struct, frozen=True, tag=True):
    """Something that happened. Named in the past tense."""


class MachineMade(Event, frozen=True):
    """How the machine that follows was made. First in a recording, and after each restart. Not fed to any machine."""

    machine: str
    """Name of its class."""
    config: bytes
    """The config to make it again from, as msgpack."""


class Command(Struct, frozen=True, tag=True):
    """Something to do. Named in the imperative. One that takes time ends in an event, also if it fails."""


class Ticked(Event, frozen=True):
    """Time passed; sent a few times a second."""


class BusLost(Event, frozen=True):
    """No heartbeats can arrive: leases stop ageing until BusFound."""


class BusFound(Event, frozen=True):
    pass


E_contra = TypeVar("E_contra", contravariant=True)


class Machine(Protocol[E_contra]):
    """One role's state. `handle` alone mutates it."""

    def handle(self, event: E_contra, now: float) -> list[Any]:
        """Returns commands in the order to carry them out. `now` never decreases. Unknown ids are ignored; repeats are
        harmless."""
        ...

    def check(self) -> None:
        """Raise AssertionError, saying what is wrong, if a conservation law of the state does not hold."""
        ...
