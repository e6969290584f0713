"""What a policy decides on: the nodes that could prefill a prompt, those that could decode it, and what is predicted
for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.core.conductor.decode_policies import DecodeCandidate, DecodePolicy, DecodeView, LeastTbt
from shared.core.conductor.prediction.booked_blocks import Coming
from shared.core.costs.links import Links
from shared.core.costs.model import prefill_s
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import NodeRef


class Candidate:
    """A node that could prefill the prompt now: a prefill node, or a decode node that would go on with it."""

    __slots__ = (
        "assigned",
        "chunk_extra_s",
        "chunk_tokens",
        "cost",
        "decode",
        "held_blocks",
        "host",
        "local_blocks",
        "queue_s",
        "ref",
    )  # fmt: skip

    def __init__(
        self,
        ref: NodeRef,
        host: str,
        cost: CostCoefficients,
        queue_s: float,
        assigned: int,
        local_blocks: int,
        *,
        chunk_tokens: int = 0,
        decode: DecodeCandidate | None = None,
        chunk_extra_s: float = 0.0,
        held_blocks: int = -1,
    ) -> None:
        self.ref = ref
        self.host = host
        self.cost = cost
        self.queue_s = queue_s
        """Predicted seconds until a prompt assigned now would start."""
        self.assigned = assigned
        """Prompts it has or is about to have."""
        self.local_blocks = local_blocks
        """Leading blocks of the prompt that its own memory or its host's cache nodes hold, or that it will have computed
        for other prompts when this one's turn comes."""
        self.held_blocks = local_blocks if held_blocks < 0 else held_blocks
        """Those of them that are there now."""
        self.chunk_tokens = chunk_tokens
        """Most prompt tokens of one of its steps; 0: unlimited."""
        self.decode = decode
        """Set if it is a decode node, which would prefill the prompt itself and go on with it."""
        self.chunk_extra_s = chunk_extra_s
        """By how much its running sequences make each chunk's step longer."""


@dataclass(slots=True)
class PolicyView:
    """What a policy decides on. There is at least one candidate."""

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    candidates: Sequence[Candidate]
    """Nodes that could prefill it. Without prefill nodes these are the decode nodes, each prefilling by itself."""
    best_blocks: int
    """Longest leading run of blocks that any one cache node holds."""
    best_host: str
    links: Links
    number: int
    """Counts the placements: what a policy that draws lots draws from."""
    locals: Sequence[Candidate] = ()
    """Decode nodes that may prefill it although there are prefill nodes: little is left to compute there, so that the
    batch they run hardly waits (arXiv paper, section 5.2)."""
    sender_wait_s: float = 0.0
    """Seconds until the best holder has sent what was assigned before."""
    coming: Coming | None = None
    """A longer run than anybody holds, which a prefill under way will have computed soon."""
    coming_host: str = ""
    """Where it can be pulled from then."""
    coming_wait_s: float = 0.0
    """By how much the coming blocks' host is late then with what it is to send before."""
    answer_tokens: float = 256.0
    """Expected length of an answer."""
    blocks: int = 0
    """Room that the prompt and its first token need."""
    decodes_of: Callable[[], Sequence[DecodeCandidate]] = tuple
    """See `decodes`. They are looked up only if somebody asks."""
    decode_policy: DecodePolicy = field(default_factory=LeastTbt)
    _decodes: Sequence[DecodeCandidate] | None = None

    @property
    def decodes(self) -> Sequence[DecodeCandidate]:
        """Nodes that could go on with it. Empty if one token is wanted."""
        if self._decodes is None:
            self._decodes = self.decodes_of()
        return self._decodes

    def usual_decode(self) -> DecodeCandidate | None:
        """The decode policy's choice; None if one token is wanted."""
        decodes = self.decodes
        return (
            self.decode_policy.choose(DecodeView(self.prompt_tokens, self.blocks, decodes))
            if decodes
            else None
        )

    # -- predictions -------------------------------------------------------------------------------------------------

    def prefix(self, candidate: Candidate, remote: bool = False) -> int:
        """Blocks that need not be computed there; `remote`: if the best prefix that exists is pulled from its holder."""
        return self.best_blocks if remote else candidate.local_blocks

    def transfer_s(self, candidate: Candidate, remote: bool) -> float:
        """Pulling what the candidate lacks of the best prefix, after what its holder sends before."""
        missing = self.best_blocks - candidate.local_blocks
        if not remote or missing <= 0:
            return 0.0
        same_host = candidate.host == self.best_host
        wait_s = 0.0 if same_host else self.sender_wait_s
        return wait_s + self.links.transfer_s(missing * self.block_bytes, same_host)

    def prefill_s(self, candidate: Candidate, remote: bool = False) -> float:
        """Loading what is held locally and computing what is not cached. What is pulled arrives in memory: its time is
        the transfer's."""
        return self._compute_s(candidate, self.prefix(candidate, remote))

    def ttft_s(self, candidate: Candidate, remote: bool = False) -> float:
        """Queue, transfer and prefill, one after the other."""
        return candidate.queue_s + self.transfer_s(candidate, remote) + self.prefill_s(candidate, remote)

    def waiting_s(self, candidate: Candidate) -> float:
        """Predicted TTFT if the candidate waits for the coming blocks, pulls them and computes only the rest. Infinite
        where nothing is coming."""
        coming = self.coming
        if coming is None or coming.blocks <= candidate.local_blocks:
            return float("inf")
        pulled = coming.blocks - candidate.local_blocks
        same_host = candidate.host == self.coming_host
        transfer_s = self.links.transfer_s(pulled * self.block_bytes, same_host)
        if not same_host:
            transfer_s += self.coming_wait_s
        return max(candidate.queue_s, coming.in_s) + transfer_s + self._compute_s(candidate, coming.blocks)

    def _compute_s(self, candidate: Candidate, cached_blocks: int) -> float:
        """Loading what is held locally and computing what is not cached."""
        cost, block_tokens = candidate.cost, self.block_tokens
        seconds = prefill_s(cost, self.prompt_tokens, cached_blocks * block_tokens)
        if cached_blocks > candidate.local_blocks:
            seconds -= cost.load_token_s * (cached_blocks - candidate.local_blocks) * block_tokens
        if candidate.chunk_extra_s:
            left = self.prompt_tokens - cached_blocks * block_tokens
            chunks = -(-left // candidate.chunk_tokens) if candidate.chunk_tokens else 1
            seconds += candidate.chunk_extra_s * chunks
        return seconds

    def handoff_s(self, candidate: Candidate, decode: DecodeCandidate, remote: bool = False) -> float:
        """From the first token until the decode node has all KVCache. It flows while it is computed, so only what the
        computation does not hide counts; nothing, if the candidate goes on itself."""
        if candidate.decode is not None:
            return 0.0
        size_bytes = self.prompt_tokens * (self.block_bytes // self.block_tokens)
        whole_s = self.links.transfer_s(size_bytes, decode.host == candidate.host)
        return max(self.links.fixed_s, whole_s - self.prefill_s(candidate, remote))

    # -- choices -----------------------------------------------------------------------------------------------------

    def choice(
        self, candidate: Candidate, reason: str, remote: bool = False, decode: DecodeCandidate | None = None
    ) -> Decision:
        """That candidate, with what is predicted for it. `decode`: who goes on; None leaves it to the decode policy."""
        return Decision(
            candidate=candidate,
            cached_blocks=self.prefix(candidate, remote),
            queue_s=candidate.queue_s,
            transfer_s=self.transfer_s(candidate, remote),
            prefill_s=self.prefill_s(candidate, remote),
            reason=reason,
            remote=remote,
            decode=candidate.decode or decode,
        )

    def waiting(self, candidate: Candidate, reason: str) -> Decision:
        """That candidate, which waits for the coming blocks and pulls them."""
        coming = self.coming
        assert coming is not None, "something is coming"
        prefill_s = self._compute_s(candidate, coming.blocks)
        queue_s = max(candidate.queue_s, coming.in_s)
        return Decision(
            candidate=candidate,
            cached_blocks=coming.blocks,
            queue_s=queue_s,
            transfer_s=self.waiting_s(candidate) - queue_s - prefill_s,
            prefill_s=prefill_s,
            reason=reason,
            decode=candidate.decode,
            waits=True,
        )

    def or_wait(self, decision: Decision, patience: float) -> Decision:
        """The decision, or one that uses what a prefill under way computes, if its first token comes at most `patience`
        times as late: that time saves a prefill that would be done twice."""
        most_s, least_s = decision.ttft_s * patience, float("inf")
        found: tuple[Candidate, bool] | None = None
        for candidate in self.candidates:
            if candidate.local_blocks > candidate.held_blocks and candidate is not decision.candidate:
                ttft_s = self.ttft_s(candidate)
                if ttft_s < least_s:
                    found, least_s = (candidate, False), ttft_s
            ttft_s = self.waiting_s(candidate)
            if ttft_s < least_s:
                found, least_s = (candidate, True), ttft_s
        if found is None or least_s > most_s:
            return decision
        candidate, pulls = found
        cached = self.coming.blocks if pulls and self.coming is not None else candidate.local_blocks
        if cached <= decision.cached_blocks:
            return decision
        if pulls:
            return self.waiting(candidate, f"waits for {cached} blocks that are being computed elsewhere")
        return self.choice(candidate, f"waits for {cached} blocks that are being computed there")

    def or_local(self, decision: Decision) -> Decision:
        """The decision, or a decode node that prefills the prompt itself if the answer starts sooner there."""
        if not self.locals or decision.candidate.decode is not None:
            return decision
        best = min(self.locals, key=self.ttft_s)
        decode = decision.decode = decision.decode or self.usual_decode()
        handoff_s = self.handoff_s(decision.candidate, decode, decision.remote) if decode is not None else 0.0
        if self.ttft_s(best) >= decision.ttft_s + handoff_s:
            return decision
        return self.choice(
            best, f"prefilled where it is decoded: {best.local_blocks} blocks cached, little left to compute"
        )


@dataclass(slots=True)
class Decision:
    """A candidate, what was predicted for it, and why it."""

    candidate: Candidate
    cached_blocks: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    reason: str
    remote: bool = False
    """The prefix comes from the best holder, not from the candidate's own host."""
    decode: DecodeCandidate | None = None
    """Who goes on. None: the decode policy chooses."""
    waits: bool = False
    """The prefix comes from a prefill under way at another node, as soon as that has ended."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.transfer_s + self.prefill_s
