"""What a worker machine is told about itself: all of them, then each role."""

from __future__ import annotations

from msgspec import Struct

from shared.core.costs.presets import SMALL_MODEL_CPU
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import Incarnation, NodeId


class WorkerConfig(Struct, frozen=True, kw_only=True):
    node: NodeId
    incarnation: Incarnation
    namespace: bytes
    block_tokens: int
    pages: int
    context_tokens: int = 0
    """Most tokens of one sequence; 0: as many as fit."""
    max_running: int = 16
    """Sequences in one step."""
    max_waiting: int = 256
    chunk_tokens: int = 512
    """Most tokens of one step."""
    gateway_lease_s: float = 10.0
    """A gateway not seen for so long is gone, and what it owned is cancelled."""
    remember_s: float = 60.0
    """How long ended attempts can still be asked about."""
    remember_attempts: int = 4096
    token_ids: bool = True
    """False in the simulator: prompts come without their ids."""
    stream_tokens: bool = True
    """False in the simulator: tokens go out with the last of their answer, but the first at once."""
    eviction: str = "lru"
    keep_blocks: bool = True
    """Keep computed blocks findable in own memory; False in simulations where the pool is all the cache there is."""
    cost: CostCoefficients = SMALL_MODEL_CPU
    fit_cost: bool = True
    """Learn the time model from own measurements. False: `cost` is given, and reported as exact."""
    host: str = ""
    """The machine it is on. Empty: unknown, and no other node is taken to be there too."""


class PrefillConfig(WorkerConfig, frozen=True, kw_only=True):
    max_running: int = 4
    """Jobs that hold pages and compute or load; the others wait."""
    chunk_tokens: int = 2048


class DecodeConfig(WorkerConfig, frozen=True, kw_only=True):
    max_running: int = 64
    max_waiting: int = 64
    """Reservations beyond what runs in one step."""
    headroom_tokens: int = 256
    """Room for so many answer tokens (at most the wanted ones) is reserved with the prompt's; more is taken as needed."""
    reservation_lease_s: float = 30.0
    """How long a writer that began may be silent. One that has not begun has as long as the gateway's budget."""
    max_repeat: int = 1
    """Most repeats of one step: 1 where tokens stream, large in the simulator."""


COUNTERS = (
    "accepted", "refused", "orphaned", "late_ignored",
    "ended_stop", "ended_length", "ended_moved", "ended_failed", "ended_refused", "ended_quietly",
    "steps", "steps_failed", "prompt_tokens_computed", "tokens_generated", "cached_tokens",
    "fetched_tokens", "fetches_failed", "blocks_pooled", "pool_writes_failed",
    "handoffs_failed", "landings_failed", "preempted",
)  # fmt: skip
"""Monotonic totals of every worker. ended_quietly: handed over or cancelled."""
