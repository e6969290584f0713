"""Eviction policies are pure ranks, known by name."""

from __future__ import annotations

from shared.core.kv.eviction import POLICIES, PageUse


def test_policies_are_known_by_their_names() -> None:
    assert {name: policy.name for name, policy in POLICIES.items()} == {"lru": "lru", "fifo": "fifo"}


def test_ranks_differ_in_what_they_look_at() -> None:
    old_but_used, new = PageUse(stored_at=1, used_at=9), PageUse(stored_at=2, used_at=3)
    assert POLICIES["lru"].rank(new) < POLICIES["lru"].rank(old_but_used)
    assert POLICIES["fifo"].rank(old_but_used) < POLICIES["fifo"].rank(new)
