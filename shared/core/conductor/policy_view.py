"""What a policy decides on: the prefill nodes that could take a prompt, and what is predicted for each."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.costs.links import Links
from shared.core.costs.model import prefill_s
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import NodeRef


class Candidate:
    """A prefill node that could take the prompt now."""

    __slots__ = ("assigned", "cost", "host", "local_blocks", "queue_s", "ref")

    def __init__(
        self,
        ref: NodeRef,
        host: str,
        cost: CostCoefficients,
        queue_s: float,
        assigned: int,
        local_blocks: int,
    ) -> None:
        self.ref = ref
        self.host = host
        self.cost = cost
        self.queue_s = queue_s
        """Predicted seconds until a prompt assigned now would start."""
        self.assigned = assigned
        """Prompts it has or is about to have."""
        self.local_blocks = local_blocks
        """Leading blocks of the prompt that its own memory or its host's cache nodes hold."""


@dataclass(slots=True)
class PolicyView:
    """What a policy decides on. There is at least one candidate."""

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    candidates: tuple[Candidate, ...]
    best_blocks: int
    """Longest leading run of blocks that any one cache node holds."""
    best_host: str
    links: Links
    number: int
    """Counts the placements: what a policy that draws lots draws from."""

    def prefix(self, candidate: Candidate, remote: bool = False) -> int:
        """Blocks that need not be computed there; `remote`: if the best prefix that exists is pulled from its holder."""
        return self.best_blocks if remote else candidate.local_blocks

    def transfer_s(self, candidate: Candidate, remote: bool) -> float:
        if not remote:
            return 0.0
        missing = self.best_blocks - candidate.local_blocks
        return self.links.transfer_s(missing * self.block_bytes, candidate.host == self.best_host)

    def prefill_s(self, candidate: Candidate, remote: bool = False) -> float:
        cached = self.best_blocks if remote else candidate.local_blocks
        return prefill_s(candidate.cost, self.prompt_tokens, cached * self.block_tokens)

    def choice(self, candidate: Candidate, reason: str, remote: bool = False) -> Decision:
        """That candidate, with what is predicted for it."""
        return Decision(
            candidate=candidate,
            cached_blocks=self.prefix(candidate, remote),
            queue_s=candidate.queue_s,
            transfer_s=self.transfer_s(candidate, remote),
            prefill_s=self.prefill_s(candidate, remote),
            reason=reason,
            remote=remote,
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

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.transfer_s + self.prefill_s
