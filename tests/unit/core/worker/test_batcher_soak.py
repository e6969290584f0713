"""Continuous batching under random load on tiny KV pools, for very many steps.

The laws are stated in tests.support: `batcher_accounts` (one ending each, no starvation), `batcher_plane` (who writes a
page is alone on it), `batcher_life` (no livelock, all pages free at the end), and in each machine's own `check`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.worlds.batcher_accounts import Accounts
from tests.support.worlds.batcher_life import Life

HAPPENS = {
    "prefill": (
        "orphaned", "handoffs_failed", "fetches_failed", "late_ignored", "steps failed", "cached_tokens",
        "fetched_tokens", "blocks_pooled", "refused: overloaded", "refused: too_large", "refused: cancelled",
        "said: length", "said: stop", "said: moved the decode node is gone", "said: moved shutting down",
        "said: failed poisoned", "said: failed not a number", "said: failed the engine gave no result",
        "said: failed deadline_exceeded", "request: handed over", "request: cancelled", "request: owner lost",
    ),
    "decode": (
        "preempted", "orphaned", "landings_failed", "fetches_failed", "late_ignored", "steps failed", "cached_tokens",
        "fetched_tokens", "blocks_pooled", "refused: overloaded", "refused: too_large", "refused: cancelled",
        "said: length", "said: stop", "said: moved a block is corrupt", "said: moved shutting down",
        "said: moved gave way: out of KV blocks", "said: refused steps would become too long",
        "said: moved the reservation lapsed", "said: failed poisoned", "said: failed not a number",
        "said: failed the engine gave no result", "said: moved decode-0 has no KV memory for a sequence of this length",
        "request: length", "request: stop", "request: cancelled", "request: owner lost",
    ),
}  # fmt: skip
"""If one of these never came about, a run was no test of it."""


def lives(role: str, seed: int, steps: int) -> tuple[Accounts, Counter[str]]:
    """One after the other, until there were so many engine steps."""
    rng = random.Random(f"{role} {seed}")
    accounts, outcomes = Accounts(), Counter[str]()
    while accounts.steps < steps:
        Life(rng, role, rng.choice((40, 150, 500)), accounts, outcomes).run()
    return accounts, outcomes


def soak(role: str, seed: int, steps: int) -> None:
    accounts, outcomes = lives(role, seed, steps)
    print(f"\n{role}: {accounts.steps} steps, the longest wait {accounts.longest_wait} steps")
    print(dict(accounts.endings), dict(sorted(outcomes.items())))
    assert sum(accounts.endings.values()) == outcomes["accepted"]
    assert outcomes["arrived"] == sum(n for what, n in outcomes.items() if what.startswith("request: "))
    missing = [what for what in HAPPENS[role] if not outcomes[what]]
    assert not missing, f"never happened: {missing}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_request_ends_nobody_starves_and_no_page_is_lost(role: str) -> None:
    soak(role, seed=2, steps=5_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_same_for_100_000_steps(role: str) -> None:
    soak(role, seed=1, steps=100_000)


def test_a_run_is_its_seed() -> None:
    assert lives("decode", 5, 300)[1] == lives("decode", 5, 300)[1]
