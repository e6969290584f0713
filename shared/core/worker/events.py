"""Events and commands of prefill and decode machines (core.worker.prefill, core.worker.decode)."""

from __future__ import annotations

from shared.core.machine import Ask, Command, Event
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, Incarnation, NodeId
from shared.protocol.requests import Accepted, AttemptState, PrefillJob, Reserved, ReserveRequest, TokenDelta

# -- events ----------------------------------------------------------------------------------------------------------


class JobSubmitted(Event, frozen=True):
    job: PrefillJob
    ask: Ask


class ReserveAsked(Event, frozen=True):
    request: ReserveRequest
    ask: Ask


class AttemptCancelled(Event, frozen=True):
    attempt: AttemptId
    reason: str = ""


class SyncAsked(Event, frozen=True):
    attempt: AttemptId
    from_index: int
    ask: Ask


class GatewaySeen(Event, frozen=True):
    """A gateway's heartbeat: the lease of all it owns. A new incarnation ends what the old one owned."""

    node: NodeId
    incarnation: Incarnation


class DrainStarted(Event, frozen=True):
    """Take nothing new; finish what can finish by the deadline, give up the rest as `moved`."""

    grace_s: float


# -- commands --------------------------------------------------------------------------------------------------------


class Reply(Command, frozen=True):
    """Answer the question `ask`."""

    ask: Ask
    message: Accepted | Reserved | AttemptState | WireError


class SendTokens(Command, frozen=True):
    """All tokens of one step for one gateway, in one message."""

    gateway: NodeId
    deltas: tuple[TokenDelta, ...]


class Drained(Command, frozen=True):
    """Nothing is left: the process may exit."""
