"""A user-defined policy, derived from a built-in one."""

from __future__ import annotations

from shared.core.conductor.placement_policies import KVCacheCentric
from shared.core.conductor.policy_options import PolicyOptions
from shared.core.conductor.policy_view import Decision, PolicyView


class LongPromptsWait(KVCacheCentric):
    """Long prompts go to the node with the most assigned work; all others by Algorithm 1."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options.balancing_threshold)

    def place(self, view: PolicyView) -> Decision:
        if view.prompt_tokens < 8000:
            return super().place(view)
        busiest = max(view.candidates, key=lambda candidate: candidate.assigned)
        return view.choice(busiest, f"long; {busiest.assigned} assigned")
