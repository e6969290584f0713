"""Which decode node goes on with a prompt, behind one protocol.

A decode policy sees the decode nodes that could take the sequence, and names one. It is pure: the same view gives the
same choice. It is not asked where the placement policy chose a decode node itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.core.conductor.policy_options import PolicyOptions
from shared.core.costs.model import step_s
from shared.protocol.cluster import CostCoefficients
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef


class DecodeCandidate:
    """A decode node that could take the sequence now."""

    __slots__ = (
        "cost",
        "free_blocks",
        "host",
        "kv_tokens",
        "local_blocks",
        "most_running",
        "ref",
        "requests",
    )

    def __init__(
        self,
        ref: NodeRef,
        host: str,
        cost: CostCoefficients,
        requests: int,
        kv_tokens: int,
        free_blocks: int,
        local_blocks: int,
        most_running: int = 0,
    ) -> None:
        self.ref = ref
        self.host = host
        self.cost = cost
        self.requests = requests
        """Sequences it has or is about to have."""
        self.kv_tokens = kv_tokens
        """KV tokens of those."""
        self.free_blocks = free_blocks
        self.local_blocks = local_blocks
        """Leading blocks of the prompt that its own memory or its host's cache nodes hold."""
        self.most_running = most_running
        """Most sequences of one step; 0: unlimited. More than that wait and make no step longer."""


@dataclass(slots=True)
class DecodeView:
    """What a decode policy decides on. There is at least one candidate."""

    prompt_tokens: int
    blocks: int
    """Room that the prompt and its first token need."""
    candidates: Sequence[DecodeCandidate]

    def with_room(self) -> Sequence[DecodeCandidate]:
        """Those with room for the prompt now, in order; all, if none has."""
        return [c for c in self.candidates if c.free_blocks >= self.blocks] or self.candidates

    def tbt_s(self, candidate: DecodeCandidate) -> float:
        """Predicted time of one step of its batch with this sequence in it."""
        return predicted_tbt_s(candidate, self.prompt_tokens)


class DecodePolicy(Protocol):
    def choose(self, view: DecodeView) -> DecodeCandidate:
        """One of the view's candidates."""
        ...


@dataclass(slots=True, frozen=True)
class LeastTbt:
    """Least predicted time between tokens, among those with room if any has; equal ones: the first."""

    def choose(self, view: DecodeView) -> DecodeCandidate:
        return min(view.with_room(), key=view.tbt_s)


DECODE_POLICIES: dict[str, Callable[[PolicyOptions], DecodePolicy]] = {
    "least_tbt": lambda options: LeastTbt()
}
"""By name. Each makes a policy from the options."""


def decode_policy_named(name: str, options: PolicyOptions) -> DecodePolicy:
    """A registered policy. Shells register a user's own class as `module:Class` (io.plugins.classes). Raises Invalid."""
    if name not in DECODE_POLICIES:
        known = ", ".join(DECODE_POLICIES)
        raise Invalid(
            f"decode_policy is {name!r}: it must be one of {known}, or module:Class", param="decode_policy"
        )
    return DECODE_POLICIES[name](options)


def predicted_tbt_s(candidate: DecodeCandidate, prompt_tokens: int) -> float:
    """One step of its batch with this sequence in it. At most `most_running` sequences are in one step."""
    requests, kv_tokens = candidate.requests + 1, candidate.kv_tokens + prompt_tokens
    most = candidate.most_running
    if most and requests > most:
        requests, kv_tokens = most, kv_tokens * most // requests
    return step_s(candidate.cost, requests, kv_tokens)
