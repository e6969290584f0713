"""An eviction policy: the least often used block goes first; among equals the one that was released longest ago.

tsukimi up --set prefill.eviction=tests.examples.eviction_policy:LeastOftenUsed
"""

from __future__ import annotations

from shared.core.kv.eviction import PageUse


class LeastOftenUsed:
    """Implements core.kv.eviction.EvictionPolicy. The rank depends on `use` alone.

    The pool keeps the rank until the block is used again, and never evicts a parent before its children.
    """

    name = "least_often_used"

    def rank(self, use: PageUse) -> tuple[int, ...]:
        return (use.uses, use.used_at)
