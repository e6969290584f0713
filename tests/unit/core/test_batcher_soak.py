"""Continuous batching under random load on tiny KV pools, for very many steps (issue 3, bar 9).

The laws are stated in tests.support: `batcher_accounts` (one ending each, no starvation), `batcher_plane` (who writes a
page is alone on it), `batcher_life` (no livelock, all pages free at the end), and in each machine's own `check`.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.support.batcher_accounts import Accounts
from tests.support.batcher_life import Life

HAPPENS = {
    "prefill": (
        "orphaned", "handoffs_failed", "fetches_failed", "late_ignored", "steps failed", "refused: overloaded",
        "refused: too_large", "refused: cancelled", "said: length", "said: stop", "said: moved", "said: failed",
        "request: handed over", "request: cancelled", "request: owner lost",
    ),
    "decode": (
        "preempted", "orphaned", "landings_failed", "fetches_failed", "late_ignored", "steps failed",
        "refused: overloaded", "refused: too_large", "refused: cancelled", "said: length", "said: stop", "said: moved",
        "said: failed", "request: length", "request: stop", "request: cancelled", "request: owner lost",
    ),
}  # fmt: skip
"""If one of these never came about, the run was no test of it."""


def soak(role: str, seed: int, steps: int) -> Counter[str]:
    """Lives, one after the other, until there were so many engine steps."""
    rng = random.Random(f"{role} {seed}")
    accounts, outcomes = Accounts(), Counter[str]()
    while accounts.steps < steps:
        Life(rng, role, rng.choice((40, 150, 500)), accounts, outcomes).run()
    requests = sum(n for what, n in outcomes.items() if what.startswith("request: "))
    endings = sum(accounts.endings.values())
    assert endings == outcomes["accepted"]
    print(
        f"\n{role}: {accounts.steps} steps, {requests} requests, longest wait {accounts.longest_wait} steps"
    )
    print(dict(accounts.endings), dict(sorted(outcomes.items())))
    missing = [what for what in HAPPENS[role] if not outcomes[what]]
    assert not missing, f"never happened: {missing}"
    return outcomes


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_request_ends_nobody_starves_and_no_page_is_lost(role: str) -> None:
    soak(role, seed=1, steps=5_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_same_for_100_000_steps(role: str) -> None:
    soak(role, seed=2, steps=100_000)


def test_a_run_is_its_seed() -> None:
    assert soak("decode", 5, 4_000) == soak("decode", 5, 4_000)
