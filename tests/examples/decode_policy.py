"""A decode policy: fills one decode node before it uses the next, so that nodes which are not needed stay idle.

tsukimi simulate TRACE --decode-policy tests.examples.decode_policy:FillOneFirst
tsukimi up --set conductor.decode_policy=tests.examples.decode_policy:FillOneFirst
"""

from __future__ import annotations

from shared.core.conductor.decode_policies import DecodeCandidate, DecodeView
from shared.core.conductor.policy_options import PolicyOptions


class FillOneFirst:
    """Implements core.conductor.decode_policies.DecodePolicy. The same view gives the same choice."""

    most_tbt_s = 0.1
    """A node whose steps would be longer than this counts as full."""

    def __init__(self, options: PolicyOptions) -> None:
        """The conductor's own options; this policy needs none of them."""

    def choose(self, view: DecodeView) -> DecodeCandidate:
        """The busiest node that is not full, of equal ones the first by name; where all are full, the one with the
        shortest steps."""
        roomy = view.with_room()
        unfilled = [c for c in roomy if view.tbt_s(c) <= self.most_tbt_s]
        if not unfilled:
            return min(roomy, key=view.tbt_s)
        return min(unfilled, key=lambda c: (-c.requests, c.ref.node))
