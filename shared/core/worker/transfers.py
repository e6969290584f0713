"""Moving KVCache blocks: commands to the data plane and the events they end in.

Pages named by a command belong to the transfer until its ending event: a machine frees them only after that.
"""

from __future__ import annotations

from shared.core.machine import Command, Event
from shared.protocol.ids import AttemptId, BlockKey, LandingId, NodeRef
from shared.protocol.requests import BlockSource, HandoffTarget
from shared.protocol.sampling import TokenLogprob

# -- pulling a cached prefix -----------------------------------------------------------------------------------------


def patience_s(source: BlockSource) -> float:
    """How long a reader waits for blocks that are being computed: half as long again as predicted, and a second. After
    that it computes what is missing itself. 0 for blocks that are there."""
    return source.ready_in_s * 1.5 + 1.0 if source.ready_in_s > 0.0 else 0.0


class FetchBlocks(Command, frozen=True):
    """Pull blocks into own pages, verifying each. Ends in BlocksFetched. keys[i] goes to pages[i]."""

    attempt: AttemptId
    source: BlockSource
    namespace: bytes
    keys: tuple[BlockKey, ...]
    pages: tuple[int, ...]
    turn: int = 1
    """Which of the attempt's fetches it is; echoed, so that an ending told again is not taken for the next one's."""


class BlocksFetched(Event, frozen=True):
    """`blocks` is the length of the contiguous verified run from the first key on; 0 when nothing came."""

    attempt: AttemptId
    first_block: int
    blocks: int
    error: str = ""
    seconds: float = 0.0
    turn: int = 1


# -- streaming KV out, layer by layer --------------------------------------------------------------------------------


class OpenHandoff(Command, frozen=True):
    """Open a stream of this sequence's KV to the decode node. From now on every step of the attempt streams the blocks it
    touched, each layer as soon as it is computed. Ends in HandoffEnded (after CommitHandoff or AbortStreams)."""

    attempt: AttemptId
    target: HandoffTarget
    pages: tuple[int, ...]
    """pages[b] holds block b of the sequence; covers the whole prompt, a partial last block included."""


class OpenPoolWrite(Command, frozen=True):
    """Open a stream of full blocks to a cache node, put-if-absent. Steps stream into it as for OpenHandoff.
    Ends in PoolWriteEnded (after CommitPoolWrite or AbortStreams). keys[i] is block first_block+i, in pages[i]."""

    attempt: AttemptId
    pool: NodeRef
    namespace: bytes
    first_block: int
    keys: tuple[BlockKey, ...]
    pages: tuple[int, ...]


class SendBlocks(Command, frozen=True):
    """Send complete blocks (all layers) into the attempt's open streams: prefix blocks that no step computes."""

    attempt: AttemptId
    first_block: int
    blocks: int
    to_handoff: bool = True
    to_pool: bool = True


class CommitHandoff(Command, frozen=True):
    """Everything is sent: let the decode node verify and go on. Carries the first token."""

    attempt: AttemptId
    blocks: int
    first_token: int
    first_logprob: TokenLogprob | None
    cached_tokens: int


class CommitPoolWrite(Command, frozen=True):
    """Publish the blocks written so far."""

    attempt: AttemptId


class AbortStreams(Command, frozen=True):
    """Give up what the attempt streams; open ones still end in HandoffEnded / PoolWriteEnded."""

    attempt: AttemptId
    handoff: bool = True
    pool: bool = True


class HandoffEnded(Event, frozen=True):
    """The stream no longer touches the pages. `ok`: the decode node verified everything and took over."""

    attempt: AttemptId
    ok: bool
    error: str = ""


class PoolWriteEnded(Event, frozen=True):
    attempt: AttemptId
    stored: int = 0
    error: str = ""


# -- receiving a handoff ---------------------------------------------------------------------------------------------


class OpenLanding(Command, frozen=True):
    """Let a writer that knows `landing` write into pages; block b of the sequence goes to pages[b].
    Ends in LandingArrived or, after CloseLanding, in LandingClosed."""

    attempt: AttemptId
    landing: LandingId
    pages: tuple[int, ...]


class CloseLanding(Command, frozen=True):
    """Fence the landing: stale writes are refused from now on. Ends in LandingClosed."""

    attempt: AttemptId
    landing: LandingId


class LandingProgressed(Event, frozen=True):
    """The writer has sent more since the last time: it is alive."""

    attempt: AttemptId


class LandingArrived(Event, frozen=True):
    """All blocks are here and their checksums verified; the landing is closed to further writes."""

    attempt: AttemptId
    first_token: int
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0


class LandingFailed(Event, frozen=True):
    """The writer committed, but a block is missing or corrupt, or the writer was lost. Fenced: pages are quiet."""

    attempt: AttemptId
    error: str


class LandingClosed(Event, frozen=True):
    """No thread writes into the landing's pages any more: they may be used again."""

    attempt: AttemptId
