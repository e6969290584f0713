"""Which nodes exist and how busy they are: announcements, heartbeats and block events."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.protocol.ids import AttemptId, BlockKey, Incarnation, NodeId, NodeRef, Role
from shared.protocol.model import ModelSpec

Stage = Literal["starting", "loading", "warming", "ready", "draining"]


class CostCoefficients(Struct, frozen=True):
    """A node's time model, fitted from its own measurements (core.costs.model gives the formulas).

    prefill_s(n, p) = prefill_fixed_s + prefill_token_s*(n-p) + prefill_square_s*(n^2-p^2) + load_token_s*p
    step_s(b, K)    = step_fixed_s + step_request_s*b + step_token_s*K      (b sequences, K KV tokens in the batch)
    """

    prefill_fixed_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_square_s: float = 0.0
    load_token_s: float = 0.0
    step_fixed_s: float = 0.0
    step_request_s: float = 0.0
    step_token_s: float = 0.0


class NodeInfo(Struct, frozen=True, tag="node_info"):
    """Announcement of one life of a node. From: every service. To: conductor, gateways, status. Redelivery harmless."""

    ref: NodeRef
    role: Role
    stage: Stage
    detail: str = ""
    """What the stage is doing now; human-readable."""
    version: str = ""
    pid: int = 0
    model: ModelSpec | None = None
    """Set from stage `warming` on by prefill and decode nodes; cache nodes serve any namespace."""
    kv_blocks: int = 0
    """Capacity in blocks."""
    max_running: int = 0
    max_waiting: int = 0
    cost: CostCoefficients | None = None
    http: str = ""
    """A gateway's `host:port`."""
    chunk_tokens: int = 0
    """Most prompt tokens of one step; 0: unknown."""


class LinkTotals(Struct, frozen=True, array_like=True):
    """All fetches over one kind of link that a node has timed. Only grows."""

    fetches: int = 0
    blocks: int = 0
    seconds: float = 0.0


class NodeLoad(Struct, frozen=True, tag="node_load"):
    """Heartbeat, sent every `heartbeat_s` and on change. From: every service. Redelivery is harmless: seq orders them."""

    node: NodeId
    incarnation: Incarnation
    role: Role
    seq: int
    stage: Stage
    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_held: int = 0
    """Blocks pinned by requests now; 0 when idle."""
    kv_blocks_cached: int = 0
    """Blocks kept for reuse, free to evict."""
    queue_s: float = 0.0
    """Prefill: predicted seconds until a job arriving now would start."""
    batch_tokens: int = 0
    """Decode: KV tokens of the running batch."""
    attempts: tuple[AttemptId, ...] = ()
    """All attempts the node has accepted and not ended. queue_s and batch_tokens already include them."""
    counters: dict[str, float] = {}
    """Monotonic totals for status, metrics and tests, e.g. prompt_tokens_computed, bytes_received."""
    block_events_seq: int = 0
    """Sequence number of the last BlockEvents published (a receiver behind it has lost some)."""
    cost: CostCoefficients | None = None
    """The time model as fitted so far. None: use the announced one."""
    cost_samples: int = 0
    """Measurements behind the time model of the role: prefill steps or decode steps. 0: the model is a guess, unless
    cost_given."""
    cost_given: bool = False
    """The time model is the announced one, taken as exact; the node measures nothing. The simulator does this."""
    fetched_near: LinkTotals = LinkTotals()
    """From cache nodes of the own host."""
    fetched_far: LinkTotals = LinkTotals()
    """From other hosts."""


class NodeLeft(Struct, frozen=True, tag="node_left"):
    node: NodeId
    incarnation: Incarnation


class RollCall(Struct, frozen=True, tag="roll_call"):
    asked_by: NodeId = ""


class BlockEvents(Struct, frozen=True, tag="block_events"):
    """Blocks that a node began or ceased to hold, in order. After a gap in seq the receiver asks for a snapshot.

    From: prefill, decode and cache nodes. To: conductor. Each key is independent; unknown ones are skipped.
    A stored block is published only once it can be read.
    """

    node: NodeId
    incarnation: Incarnation
    seq: int
    """1, 2, 3 ... within one incarnation."""
    stored: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()


class SnapshotAsked(Struct, frozen=True, tag="snapshot_asked"):
    asked_by: NodeId = ""


class BlockSnapshotPart(Struct, frozen=True, tag="block_snapshot_part"):
    """One part of the set of all keys held after event `seq`. Parts are numbered 0..parts-1; each fits max_payload."""

    node: NodeId
    incarnation: Incarnation
    seq: int
    part: int
    parts: int
    keys: tuple[BlockKey, ...] = ()
