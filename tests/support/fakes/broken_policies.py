"""Policies as a user may get them wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared.core.conductor.decode_policies import DecodeCandidate, DecodeView
from shared.core.conductor.placement_policies import CacheAware
from shared.core.conductor.policy_options import PolicyOptions
from shared.core.conductor.policy_view import Candidate, Decision, PolicyView
from shared.protocol.errors import Overloaded
from shared.protocol.ids import NodeRef

NOT_A_CLASS = 1
FAILS_FROM_TOKENS = 500


class _Policy:
    def __init__(self, options: PolicyOptions) -> None: ...


class NoPlace(_Policy):
    def palce(self, view: PolicyView) -> Decision:
        return CacheAware().place(view)


class CannotBeMade:
    def __init__(self, options: PolicyOptions) -> None:
        raise MemoryError("wants more memory")


class TakesNothing:
    def place(self, view: PolicyView) -> Decision:
        return CacheAware().place(view)


class AlwaysRaises(_Policy):
    def place(self, view: PolicyView) -> Decision:
        raise ZeroDivisionError("of nothing by nothing")


class RaisesForLongPrompts(_Policy):
    """Passes a rehearsal."""

    def place(self, view: PolicyView) -> Decision:
        if view.prompt_tokens >= FAILS_FROM_TOKENS:
            raise RuntimeError("never thought of that")
        return CacheAware().place(view)


class NamesNobody(_Policy):
    def place(self, view: PolicyView) -> Any:
        return None


class NamesAStranger(_Policy):
    def place(self, view: PolicyView) -> Decision:
        known = view.candidates[0]
        stranger = Candidate(NodeRef("nobody", "1"), "nowhere", known.cost, 0.0, 0, 0)
        return view.choice(stranger, "it seemed free")


class PredictsNonsense(_Policy):
    def place(self, view: PolicyView) -> Decision:
        return replace(CacheAware().place(view), prefill_s=float("nan"))


class Refuses(_Policy):
    def place(self, view: PolicyView) -> Decision:
        raise Overloaded("not today", retry_after_s=1.0)


class ChooseRaises(_Policy):
    def choose(self, view: DecodeView) -> DecodeCandidate:
        raise ZeroDivisionError("of nothing by nothing")
