"""A placement policy: prompts that are mostly cached go where their KVCache is, the others where the queue is shortest.

tsukimi simulate TRACE --policy tests.examples.placement_policy:StickyOrShortest
tsukimi up --policy tests.examples.placement_policy:StickyOrShortest
"""

from __future__ import annotations

from shared.core.conductor.policy_options import PolicyOptions
from shared.core.conductor.policy_view import Decision, PolicyView


class StickyOrShortest:
    """Implements core.conductor.policies.Policy. The same view gives the same choice."""

    cached_share = 0.5
    """From this share of the prompt on, the KVCache decides."""

    def __init__(self, options: PolicyOptions) -> None:
        """The conductor's own options; this policy needs none of them."""

    def place(self, view: PolicyView) -> Decision:
        holder = max(view.candidates, key=lambda c: c.local_blocks)
        cached_tokens = holder.local_blocks * view.block_tokens
        if cached_tokens >= self.cached_share * view.prompt_tokens:
            return view.choice(holder, f"{cached_tokens} of {view.prompt_tokens} tokens cached there")
        shortest = min(view.candidates, key=lambda c: c.queue_s)
        return view.choice(shortest, f"shortest queue of {len(view.candidates)}: {shortest.queue_s:.3f} s")
