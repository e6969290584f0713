"""What happens to the conductor and what it does (machine: core.conductor.machine)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.core.conductor.objectives import Objectives
from shared.core.costs.links import Links
from shared.core.costs.presets import SMALL_MODEL_CPU
from shared.core.machine import Ask, Command, Event
from shared.protocol.cluster import BlockEvents, BlockSnapshotPart, CostCoefficients, NodeInfo, NodeLoad
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, Incarnation, NodeId, NodeRef
from shared.protocol.requests import Placement, PlaceRequest


class ConductorConfig(Struct, frozen=True):
    policy: str = "kvcache_centric"
    """A name in core.conductor.policies.POLICIES, or `module:Class`."""
    balancing_threshold: float = 1.0
    """A prefix elsewhere is pulled if it is more than this many times as long as the local one (at least 1)."""
    patience: float = 1.5
    """A prompt waits for a prefill under way that computes its prefix, if its first token comes at most so many times as
    late."""
    seed: int = 0
    """For policies that draw lots."""
    objectives: Objectives = Objectives()
    links: Links = Links()
    inline_tokens: int = 64
    """Most uncached prompt tokens that a decode node may prefill by itself; 0: none."""
    pool_answers: bool = True
    """Answers go to the pool too, so that the next turn finds them."""
    prior: CostCoefficients = SMALL_MODEL_CPU
    """Time model of nodes that announce none."""
    lost_after_s: float = 2.0
    stale_s: float = 5.0
    """A load report older than this says nothing."""
    index_blocks: int = 4_000_000
    decisions_kept: int = 1000
    """How many of the latest decisions can be explained."""
    decode_policy: str = "least_tbt"
    """A name in core.conductor.decode_policies.DECODE_POLICIES, or `module:Class`."""


# -- events ----------------------------------------------------------------------------------------------------------


class ConductorStarted(Event, frozen=True):
    """State is empty: call the roll."""


class NodeAnnounced(Event, frozen=True):
    info: NodeInfo


class LoadReported(Event, frozen=True):
    load: NodeLoad


class NodeDeparted(Event, frozen=True):
    node: NodeId
    incarnation: Incarnation


class BlocksChanged(Event, frozen=True):
    events: BlockEvents


class SnapshotArrived(Event, frozen=True):
    part: BlockSnapshotPart


class PlaceAsked(Event, frozen=True):
    request: PlaceRequest
    ask: Ask


class GivenUp(Event, frozen=True):
    """The asker of this attempt's placement does not use it."""

    attempt: AttemptId


# -- commands --------------------------------------------------------------------------------------------------------


class ReplyPlacement(Command, frozen=True):
    ask: Ask
    placement: Placement


class ReplyRefusal(Command, frozen=True):
    ask: Ask
    error: WireError


class AskSnapshot(Command, frozen=True):
    """Of the blocks a node holds; it comes as SnapshotArrived events."""

    node: NodeId


class CallRoll(Command, frozen=True):
    """Ask all nodes to announce themselves."""


class NoticeNode(Command, frozen=True):
    """Tell people what became of a life of a node."""

    ref: NodeRef
    what: Literal["joined", "stage", "lost", "returned", "left", "suspect", "foreign"]
    """foreign: its KVCache does not fit the other nodes' of the same model; it gets no work."""
    detail: str = ""


class NoticePolicyFailed(Command, frozen=True):
    """Tell people that a policy failed on a request. A built-in one placed it instead."""

    attempt: AttemptId
    error: str
    """What it raised, and where."""
