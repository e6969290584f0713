"""The messages that carry one request through the cluster.

Messages carry time budgets (seconds remaining), not deadlines. Each receiver turns one into a deadline on its own clock.
A point in time in a message is by the sender's clock; it is compared with others of that sender alone.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.protocol.ids import AttemptId, BlockKey, Incarnation, LandingId, NodeId, NodeRef
from shared.protocol.sampling import SamplingParams, TokenLogprob

# -- placement: gateway -> conductor ---------------------------------------------------------------------------------


class PlaceRequest(Struct, frozen=True, tag="place_request"):
    """Ask where to run an attempt. Gateway -> conductor. Redelivery gives a second, equally valid answer."""

    attempt: AttemptId
    model: str
    prompt_tokens: int
    block_keys: tuple[BlockKey, ...]
    """Chained keys of the prompt's full blocks."""
    max_new_tokens: int
    budget_s: float
    avoid: tuple[tuple[NodeId, Incarnation], ...] = ()
    """Lives of nodes on which this request has just failed."""
    retry: bool = False
    """A failover of a request already being answered: never refused for SLO reasons."""
    asker: Incarnation = ""
    """Whose clock `asked_at_s` is by."""
    asked_at_s: float = 0.0
    """When it was sent, by the asker's monotonic clock."""
    waits_s: float = 0.0
    """How long the asker waits for the answer. A question read later than that is not answered with a place; 0: it always
    is."""


class PlaceGivenUp(Struct, frozen=True, tag="place_given_up"):
    """Nobody waits for the answer to this PlaceRequest any more, or will use it. Gateway -> conductor, sent behind the
    request. What is booked for it is free again. Harmless if repeated, or if nothing was booked."""

    attempt: AttemptId


class BlockSource(Struct, frozen=True):
    """Where a run of the prompt's blocks can be pulled from."""

    holder: NodeRef
    first_block: int
    blocks: int
    ready_in_s: float = 0.0
    """They are being computed, and the holder is predicted to have them after so many seconds. A reader waits for them,
    within reason (core.worker.transfers.patience_s). 0: it has them now."""


class Prediction(Struct, frozen=True):
    """What the conductor expects, in seconds. Used for calibration and shown to people."""

    queue_s: float = 0.0
    transfer_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    tbt_s: float = 0.0


class Placement(Struct, frozen=True, tag="placement"):
    """Where a request goes and why. Conductor -> gateway."""

    attempt: AttemptId
    prefill: NodeRef | None
    """None: the decode node prefills the prompt itself (short or well-cached prompts)."""
    decode: NodeRef | None
    """None: one token only, nothing to hand over."""
    sources: tuple[BlockSource, ...] = ()
    """Runs of cached prefix blocks to load, in order. Blocks already in the node's own memory have no source."""
    pool: NodeRef | None = None
    """The cache node that gets the prompt's blocks."""
    decode_pool: NodeRef | None = None
    """The cache node that gets the answer's blocks."""
    cached_blocks: int = 0
    """Length of the reusable prefix the prediction counts on."""
    predicted: Prediction = Prediction()
    policy: str = ""
    reason: str = ""
    tbt_limit_s: float = 0.0
    """A decode node refuses the sequence if steps with it would be longer, once its KVCache is there; 0: never."""


# -- decode: gateway -> decode node ----------------------------------------------------------------------------------


class LocalPrefill(Struct, frozen=True):
    """Everything a decode node needs to prefill a prompt itself."""

    tokens: bytes
    """Prompt token ids, little-endian u32."""
    sources: tuple[BlockSource, ...] = ()


class ReserveRequest(Struct, frozen=True, tag="reserve_request"):
    """Reserve room before prefill starts. Gateway -> decode. Redelivery of the same attempt returns the same landing."""

    attempt: AttemptId
    gateway: NodeId
    gateway_incarnation: Incarnation
    incarnation: Incarnation
    """The life of the decode node that is meant. Another life answers Unavailable."""
    namespace: bytes
    prompt_tokens: int
    max_new_tokens: int
    sampling: SamplingParams
    block_keys: tuple[BlockKey, ...]
    """Keys of the prompt's full blocks (the answer's blocks chain on from the last)."""
    tail_tokens: tuple[int, ...]
    """Prompt token ids after the last full block."""
    pool: NodeRef | None = None
    local: LocalPrefill | None = None
    """Set if this node must also prefill. Then no landing is opened."""
    budget_s: float = 0.0
    first_index: int = 0
    """Index in the answer of the first token this attempt makes (> 0 after a failover)."""
    tokens: bytes = b""
    """Prompt token ids, little-endian u32. Set if sampling needs them and `local` is None."""
    tbt_limit_s: float = 0.0
    """As in the Placement. A sequence that lands here is told of at once (TokenDelta without tokens), or refused."""
    moves: int = 0
    """How often a decode node gave this answer up before. Who has moved more often gives way later."""


class Reserved(Struct, frozen=True, tag="reserved"):
    """Room is held under a lease. Decode -> gateway."""

    attempt: AttemptId
    landing: LandingId
    """Empty for local prefill."""
    blocks: int


# -- prefill: gateway -> prefill node --------------------------------------------------------------------------------


class HandoffTarget(Struct, frozen=True):
    """The room at the decode node that this prompt's KV is written to."""

    decode: NodeRef
    landing: LandingId


class PrefillJob(Struct, frozen=True, tag="prefill_job"):
    """Prefill a prompt and sample its first token. Gateway -> prefill. Redelivery of the same attempt is ignored."""

    attempt: AttemptId
    gateway: NodeId
    gateway_incarnation: Incarnation
    incarnation: Incarnation
    namespace: bytes
    tokens: bytes
    """Prompt token ids, little-endian u32. Empty in the simulator, which needs none."""
    block_keys: tuple[BlockKey, ...]
    sampling: SamplingParams
    max_new_tokens: int
    sources: tuple[BlockSource, ...] = ()
    pool: NodeRef | None = None
    handoff: HandoffTarget | None = None
    """None: only the first token is wanted."""
    budget_s: float = 0.0
    first_index: int = 0
    prompt_tokens: int = 0
    """Length of the prompt. 0: as many as there are ids in `tokens`."""


class Accepted(Struct, frozen=True, tag="accepted"):
    attempt: AttemptId


# -- tokens: prefill, decode -> gateway ------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "moved", "failed", "refused"]
"""stop: an EOS token (it is the last token of the delta); length: max_new_tokens reached; moved: the node gave
the sequence up (drain, preemption, lost or corrupt KV), so place it again; failed: this request can't be served (see
error); refused: steps would become too long with it, so try again after retry_after_s."""


class StageTimes(Struct, frozen=True, array_like=True):
    """What the stages of a prompt's prefill took, in seconds, as the node measured them. They mean what those of a
    Prediction mean."""

    queue_s: float = 0.0
    """From its acceptance to its first step, but for the two below: for its turn, or for blocks being computed."""
    transfer_s: float = 0.0
    """Pulling blocks from other hosts."""
    prefill_s: float = 0.0
    """Loading blocks from the own host, and from the first step to the first token."""


class TokenDelta(Struct, frozen=True, array_like=True):
    """Next tokens of one attempt. `index` counts from the answer's first token, over all attempts."""

    attempt: AttemptId
    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Empty, or one per token."""
    finish: FinishReason | None = None
    error: str = ""
    cached_tokens: int | None = None
    """On the delta with the attempt's first token: prompt tokens whose KV was reused, not computed."""
    retry_after_s: float = 0.0
    """With `refused`: when there is room, as predicted."""
    stages: StageTimes | None = None
    """On the delta with the attempt's first token, from the node that computed the prompt."""


class TokenBatch(Struct, frozen=True, tag="token_batch"):
    """All tokens of one engine step for one gateway. Harmless when repeated: indexes place every token."""

    node: NodeId
    incarnation: Incarnation
    deltas: tuple[TokenDelta, ...]


class CancelAttempt(Struct, frozen=True, tag="cancel_attempt"):
    attempt: AttemptId
    reason: str = ""


class SyncRequest(Struct, frozen=True, tag="sync_request"):
    """Ask for the state of an attempt. Also renews its lease. Gateway -> prefill, decode."""

    attempt: AttemptId
    from_index: int


class AttemptState(Struct, frozen=True, tag="attempt_state"):
    """Answer to SyncRequest. Idempotent; `delta` holds all known tokens from `from_index` on."""

    attempt: AttemptId
    state: Literal["unknown", "waiting", "running", "finished"]
    delta: TokenDelta | None = None
