"""Where a prompt is prefilled: Algorithm 1 of the Mooncake papers and its rivals, behind one protocol.

A policy sees the prefill nodes, the decode nodes and everything predicted that it may want to weigh
(core.conductor.policy_view). It names who prefills, and may name who decodes. It is pure: the same view gives the same
choice. Equal candidates go to the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from shared.core.conductor.decode_policies import DecodeCandidate, predicted_tbt_s
from shared.core.conductor.policy_options import PolicyOptions
from shared.core.conductor.policy_view import Candidate, Decision, PolicyView
from shared.core.costs.model import step_s
from shared.protocol.errors import Invalid


class Policy(Protocol):
    def place(self, view: PolicyView) -> Decision: ...


@dataclass(slots=True, frozen=True)
class KVCacheCentric:
    """Algorithm 1: least predicted TTFT, over queue, transfer and prefill.

    The best prefix is pulled to a node only if it is more than `balancing_threshold` times as long as what the node's
    host holds; a copy stays there, which is how hot prefixes spread. A decode node prefills the prompt itself if little
    is left to compute and its first token comes sooner so. A prompt whose prefix is being computed waits for it, if that
    makes its first token at most `patience` times as late.
    """

    balancing_threshold: float = 1.0
    patience: float = 1.0

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
        decision = view.choice(best, f"least TTFT of {len(view.candidates)}: {how}", pulled)
        return view.or_local(view.or_wait(decision, self.patience))


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
class Joint:
    """Prefill node, decode node and way of the KVCache in one choice: the least latency added to the whole cluster.

    The cost of a choice, in seconds, has two parts. One is what the request itself waits: queue, transfer, prefill, the
    part of the hand-over that nothing hides, and its decode steps. The other is what it makes the decode node's other
    sequences wait: longer steps, and the chunks of a prompt that is prefilled between them.
    """

    balancing_threshold: float = 1.0

    def place(self, view: PolicyView) -> Decision:
        best: tuple[float, Candidate, bool, DecodeCandidate | None] | None = None
        usual = self._least_loaded(view, view.decodes)
        by_host = self._by_host(view)
        for candidate in (*view.candidates, *view.locals):
            remote = view.best_blocks > self.balancing_threshold * candidate.local_blocks
            ttft_s = view.ttft_s(candidate, remote)
            if best is not None and ttft_s >= best[0]:
                continue
            if candidate.decode is not None:
                decodes: tuple[DecodeCandidate, ...] = (candidate.decode,)
            else:
                near = by_host.get(candidate.host)
                decodes = (usual,) if usual is not None else ()
                if near is not None and near is not usual:
                    decodes += (near,)
            if not decodes and (best is None or ttft_s < best[0]):
                best = ttft_s, candidate, remote, None
            for one in decodes:
                cost_s = ttft_s + view.handoff_s(candidate, one, remote) + self._decoding_s(view, one)
                if candidate.decode is not None:
                    cost_s += view.prefill_s(candidate, remote) * one.requests
                if best is None or cost_s < best[0]:
                    best = cost_s, candidate, remote, one
        assert best is not None, "a view has a candidate"
        cost_s, candidate, remote, decode = best
        where = "prefilled where it is decoded" if candidate.decode else f"{len(view.candidates)} candidates"
        return view.choice(candidate, f"least latency for all, {cost_s:.3f} s: {where}", remote, decode)

    def _decoding_s(self, view: PolicyView, decode: DecodeCandidate) -> float:
        """The answer's steps, and what they add to the others' steps meanwhile."""
        with_s = predicted_tbt_s(decode, view.prompt_tokens)
        without_s = step_s(decode.cost, decode.requests, decode.kv_tokens) if decode.requests else with_s
        return view.answer_tokens * (with_s + decode.requests * max(0.0, with_s - without_s))

    def _least_loaded(self, view: PolicyView, decodes: Sequence[DecodeCandidate]) -> DecodeCandidate | None:
        roomy = [d for d in decodes if d.free_blocks >= view.blocks] or decodes
        return min(roomy, key=lambda d: self._decoding_s(view, d), default=None)

    def _by_host(self, view: PolicyView) -> dict[str, DecodeCandidate]:
        hosts: dict[str, list[DecodeCandidate]] = {}
        for decode in view.decodes:
            hosts.setdefault(decode.host, []).append(decode)
        found = {host: self._least_loaded(view, decodes) for host, decodes in hosts.items()}
        return {host: decode for host, decode in found.items() if decode is not None}


POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "kvcache_centric": lambda options: KVCacheCentric(options.balancing_threshold, options.patience),
    "cache_aware": lambda options: CacheAware(),
    "load_balance": lambda options: LoadBalance(),
    "random": lambda options: Random(options.seed),
    "joint": lambda options: Joint(options.balancing_threshold),
}
"""By name. Each makes a policy from the options."""
FALLBACK = "kvcache_centric"
"""Places the requests on which another policy fails."""


def policy_named(name: str, options: PolicyOptions) -> Policy:
    """A registered policy. Shells register a user's own class as `module:Class` (io.plugins.classes). Raises Invalid."""
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise Invalid(f"policy is {name!r}: it must be one of {known}, or module:Class", param="policy")
    return POLICIES[name](options)
