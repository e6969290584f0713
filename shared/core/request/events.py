"""What happens to one choice of a request, and what its owner, the gateway, does (machine: core.request.machine)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.core.machine import Command, Event
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, BlockKey, Incarnation, NodeId, NodeRef, RequestId
from shared.protocol.requests import (
    AttemptState,
    Placement,
    PlaceRequest,
    PrefillJob,
    Reserved,
    ReserveRequest,
    StageTimes,
    TokenDelta,
)
from shared.protocol.sampling import SamplingParams, TokenLogprob


class ChoiceSpec(Struct, frozen=True):
    """One choice to generate: everything is checked against the model already."""

    request: RequestId
    choice: int
    model: str
    namespace: bytes
    block_tokens: int
    prompt_tokens: int
    prompt: bytes
    """Token ids, little-endian u32. Empty in the simulator, which needs none."""
    block_keys: tuple[BlockKey, ...]
    """Keys of the prompt's full blocks."""
    max_new_tokens: int
    sampling: SamplingParams
    gateway: NodeId = ""
    gateway_incarnation: Incarnation = ""


class LifecycleConfig(Struct, frozen=True):
    budget_s: float = 600.0
    """A request that did not end by then fails."""
    idle_sync_s: float = 1.0
    """Silence after which the node that should be making tokens is asked."""
    gap_sync_s: float = 0.1
    """How long a missing index may be on its way from another node before it is asked for."""
    backoff_first_s: float = 0.05
    backoff_most_s: float = 1.0
    bus_grace_s: float = 3.0
    """After the bus came back, nodes get this long to come back too."""
    sync_tries: int = 3
    """Unanswered questions in a row after which a node is given up."""
    overloads_most: int = 3
    """Places that turn out full before the request itself is refused."""
    losses_most: int = 8
    """Nodes lost in a row under this request without one new token: then it is taken to be the cause."""


class ChoiceSetup(Struct, frozen=True):
    """All that a RequestMachine is made of, as recordings keep it."""

    spec: ChoiceSpec
    config: LifecycleConfig


class Prefilled(Struct, frozen=True):
    """An attempt's prompt was computed: what had been predicted for it, and what it took."""

    placement: Placement
    stages: StageTimes
    ttft_s: float
    """From asking for a place to the first token's arrival."""


# -- events ----------------------------------------------------------------------------------------------------


class Started(Event, frozen=True):
    pass


class PlaceAnswered(Event, frozen=True):
    attempt: AttemptId
    placement: Placement


class PlaceRefused(Event, frozen=True):
    """Also: nobody answered (unavailable, deadline_exceeded)."""

    attempt: AttemptId
    error: WireError


class ReserveAnswered(Event, frozen=True):
    attempt: AttemptId
    node: NodeId
    reserved: Reserved


class ReserveRefused(Event, frozen=True):
    attempt: AttemptId
    node: NodeId
    error: WireError


class SubmitAnswered(Event, frozen=True):
    attempt: AttemptId
    node: NodeId


class SubmitRefused(Event, frozen=True):
    attempt: AttemptId
    node: NodeId
    error: WireError


class TokensArrived(Event, frozen=True):
    attempt: AttemptId
    node: NodeId
    incarnation: Incarnation
    delta: TokenDelta


class SyncAnswered(Event, frozen=True):
    attempt: AttemptId
    node: NodeId
    state: AttemptState


class SyncFailed(Event, frozen=True):
    attempt: AttemptId
    node: NodeId
    error: WireError


class NodeSuspected(Event, frozen=True):
    """A heartbeat is late."""

    node: NodeId
    incarnation: Incarnation


class NodeLost(Event, frozen=True):
    """This life of a node is over, or taken to be."""

    node: NodeId
    incarnation: Incarnation


class ClientGone(Event, frozen=True):
    """Nobody wants the answer any more: the client left, cancelled, or reads too slowly."""

    reason: str = ""


class StopMet(Event, frozen=True):
    """The shell found a stop string; the answer ends with its first `tokens` tokens."""

    tokens: int


# -- commands --------------------------------------------------------------------------------------------------


class AskPlace(Command, frozen=True):
    """Ends in PlaceAnswered or PlaceRefused."""

    request: PlaceRequest


class Reserve(Command, frozen=True):
    """Ends in ReserveAnswered or ReserveRefused."""

    node: NodeRef
    request: ReserveRequest


class SubmitPrefill(Command, frozen=True):
    """Ends in SubmitAnswered or SubmitRefused."""

    node: NodeRef
    job: PrefillJob


class Cancel(Command, frozen=True):
    node: NodeId
    attempt: AttemptId
    reason: str


class AskSync(Command, frozen=True):
    """Ends in SyncAnswered or SyncFailed."""

    node: NodeId
    attempt: AttemptId
    from_index: int


class Deliver(Command, frozen=True):
    """The next tokens of the answer, in order and once each."""

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Empty, or one per token."""
    cached_tokens: int | None = None
    """With the answer's first token."""


class Finish(Command, frozen=True):
    """The answer is complete. The last command but for cancellations."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Fail(Command, frozen=True):
    """The answer can't be completed."""

    error: WireError


class SetTimer(Command, frozen=True):
    """Feed Ticked at `at` or soon after. Ticks in excess are harmless."""

    at: float
