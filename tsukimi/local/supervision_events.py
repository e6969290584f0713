"""What happens to the processes of a local cluster, and what the supervisor orders."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.core.machine import Command, Event

Phase = Literal["waiting", "starting", "running", "backing_off", "gone"]


class ServiceSpec(Struct, frozen=True):
    """One process of the cluster."""

    name: str
    argv: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Services that must have been ready once before this one starts."""
    stop_wave: int = 0
    """Lower waves are stopped first. A wave begins when the processes of the one before are gone."""
    grace_s: float = 12.0
    """Seconds from SIGTERM to SIGKILL."""


# -- events ----------------------------------------------------------------------------------------------------------


class LaunchAsked(Event, frozen=True):
    pass


class ProcessStarted(Event, frozen=True):
    name: str
    pid: int


class StartFailed(Event, frozen=True):
    name: str
    error: str


class ProcessExited(Event, frozen=True):
    """`code` is negative for a signal, as in subprocess."""

    name: str
    code: int


class StageSeen(Event, frozen=True):
    """A node announced its stage. Ignored if it is of another life than the running one."""

    name: str
    pid: int
    stage: str
    detail: str = ""


class StopAsked(Event, frozen=True):
    """The second time, everything that still runs is killed at once."""

    reason: str = ""


class Ticked(Event, frozen=True):
    pass


# -- commands --------------------------------------------------------------------------------------------------------


class StartProcess(Command, frozen=True):
    """Ends in ProcessStarted or StartFailed. A started process ends in ProcessExited."""

    name: str


class SignalProcess(Command, frozen=True):
    name: str
    pid: int
    kill: bool = False


class Tell(Command, frozen=True):
    """A line for the person watching."""

    name: str
    text: str


class ShowStage(Command, frozen=True):
    name: str
    stage: str
    detail: str = ""


class ReportReady(Command, frozen=True):
    """Every service is ready. Ordered once."""


class ReportFailure(Command, frozen=True):
    """The cluster cannot go on because of `name`; it is being stopped."""

    name: str
    why: str


class Finish(Command, frozen=True):
    """No process is left."""

    failed: bool


class ServiceView(Struct, frozen=True):
    name: str
    phase: Phase
    pid: int
    stage: str
    detail: str
    restarts: int
