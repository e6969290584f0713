"""Where a prompt is prefilled: Algorithm 1 of the Mooncake papers and its rivals, behind one protocol.

A policy sees candidates with everything predicted that it may want to weigh (core.conductor.policy_view), and names one.
It is pure: the same view gives the same choice. Equal candidates go to the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from shared.core.conductor.policy_view import Decision, PolicyView
from shared.protocol.errors import Invalid


class Policy(Protocol):
    def place(self, view: PolicyView) -> Decision: ...


@dataclass(slots=True, frozen=True)
class KVCacheCentric:
    """Algorithm 1: least predicted TTFT, over queue, transfer and prefill.

    The best prefix is pulled to a node only if it is more than `balancing_threshold` times as long as what the node's
    host holds; a copy stays there, which is how hot prefixes spread.
    """

    balancing_threshold: float = 1.0

    def place(self, view: PolicyView) -> Decision:
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

    def place(self, view: PolicyView) -> Decision:
        best = min(view.candidates, key=lambda c: c.queue_s + view.prefill_s(c))
        how = f"{best.local_blocks} blocks local"
        return view.choice(best, f"least queue + prefill of {len(view.candidates)}: {how}")


@dataclass(slots=True, frozen=True)
class LoadBalance:
    """Fewest prompts assigned."""

    def place(self, view: PolicyView) -> Decision:
        lightest = min(view.candidates, key=lambda c: c.assigned)
        return view.choice(lightest, f"fewest assigned of {len(view.candidates)}: {lightest.assigned}")


@dataclass(slots=True, frozen=True)
class Random:
    """Any, by a draw that depends on seed and placement number alone."""

    seed: int = 0

    def place(self, view: PolicyView) -> Decision:
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
"""By name. Each makes a policy from the options."""


def policy_named(name: str, options: PolicyOptions) -> Policy:
    """A registered policy. Shells register a user's own class as `module:Class` (io.plugins). Raises Invalid."""
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise Invalid(f"policy is {name!r}: it must be one of {known}, or module:Class", param="policy")
    return POLICIES[name](options)
