"""Where a prompt is prefilled: Algorithm 1 of the Mooncake papers and its rivals, behind one protocol.

A policy sees candidates with everything predicted that it may want to weigh, and names one. It is pure: the same view
gives the same choice. Equal candidates go to the first one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from shared.core.cost import prefill_s
from shared.core.links import Links
from shared.protocol.cluster import CostCoefficients
from shared.protocol.errors import Invalid
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
class PlaceView:
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

    def choice(self, candidate: Candidate, reason: str, remote: bool = False) -> Choice:
        """That candidate, with what is predicted for it."""
        return Choice(
            candidate=candidate,
            cached_blocks=self.prefix(candidate, remote),
            queue_s=candidate.queue_s,
            transfer_s=self.transfer_s(candidate, remote),
            prefill_s=self.prefill_s(candidate, remote),
            reason=reason,
            remote=remote,
        )


@dataclass(slots=True)
class Choice:
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


class Policy(Protocol):
    def place(self, view: PlaceView) -> Choice: ...


@dataclass(slots=True, frozen=True)
class KVCacheCentric:
    """Algorithm 1: least predicted TTFT, over queue, transfer and prefill.

    The best prefix is pulled to a node only if it is more than `balancing_threshold` times as long as what the node's
    host holds; a copy stays there, which is how hot prefixes spread.
    """

    balancing_threshold: float = 1.0

    def place(self, view: PlaceView) -> Choice:
        best, least_s, pulled = view.candidates[0], float("inf"), False
        for candidate in view.candidates:
            ttft_s = candidate.queue_s
            if ttft_s >= least_s:
                continue
            remote = view.best_blocks > self.balancing_threshold * candidate.local_blocks
            if remote:
                ttft_s += view.transfer_s(candidate, remote)
            ttft_s += view.prefill_s(candidate, remote)
            if ttft_s < least_s:
                best, least_s, pulled = candidate, ttft_s, remote
        how = f"{view.prefix(best, pulled)} blocks {'pulled' if pulled else 'local'}"
        return view.choice(best, f"least TTFT of {len(view.candidates)}: {how}", pulled)


@dataclass(slots=True, frozen=True)
class CacheAware:
    """Least queue plus prefill time, counting only what a node's own host holds."""

    def place(self, view: PlaceView) -> Choice:
        best = min(view.candidates, key=lambda c: c.queue_s + view.prefill_s(c))
        how = f"{best.local_blocks} blocks local"
        return view.choice(best, f"least queue + prefill of {len(view.candidates)}: {how}")


@dataclass(slots=True, frozen=True)
class LoadBalance:
    """Fewest prompts assigned."""

    def place(self, view: PlaceView) -> Choice:
        lightest = min(view.candidates, key=lambda c: c.assigned)
        return view.choice(lightest, f"fewest assigned of {len(view.candidates)}: {lightest.assigned}")


@dataclass(slots=True, frozen=True)
class Random:
    """Any, by a draw that depends on seed and placement number alone."""

    seed: int = 0

    def place(self, view: PlaceView) -> Choice:
        digest = blake2b(f"{self.seed}:{view.number}".encode(), digest_size=8).digest()
        drawn = view.candidates[int.from_bytes(digest, "little") % len(view.candidates)]
        return view.choice(drawn, f"drawn from {len(view.candidates)}")


@dataclass(slots=True, frozen=True)
class PolicyOptions:
    """What a policy may be configured with; each takes what it knows."""

    balancing_threshold: float = 1.0
    seed: int = 0


POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "kvcache_centric": lambda options: KVCacheCentric(options.balancing_threshold),
    "cache_aware": lambda options: CacheAware(),
    "load_balance": lambda options: LoadBalance(),
    "random": lambda options: Random(options.seed),
}


def policy_named(name: str, options: PolicyOptions) -> Policy:
    """A policy by its name, or by `module:Class` of the user's own, called with the options. Raises Invalid."""
    if name in POLICIES:
        return POLICIES[name](options)
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(POLICIES)
        raise Invalid(
            f"no policy is called {name!r}; there are {known}, or give module:Class", param="policy"
        )
    try:
        policy: Policy = getattr(importlib.import_module(module), attribute)(options)
    except (ImportError, AttributeError) as e:
        raise Invalid(f"policy {name!r} can't be loaded: {e}", param="policy") from e
    return policy
