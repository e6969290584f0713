from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.placement_policies import POLICIES, KVCacheCentric, policy_named
from shared.core.conductor.policy_options import PolicyOptions
from shared.core.conductor.policy_view import Candidate, Decision, PolicyView
from shared.core.costs.links import Links
from shared.core.costs.model import prefill_s, transfer_s
from shared.protocol.cluster import CostCoefficients
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef

COST = CostCoefficients(prefill_fixed_s=0.01, prefill_token_s=1e-3, load_token_s=1e-5)
LINKS = Links(nic_bytes_s=1e6, shm_bytes_s=1e7, fixed_s=0.0)


def candidate(i: int, queue_s: float = 0.0, local_blocks: int = 0, assigned: int = 0) -> Candidate:
    return Candidate(
        ref=NodeRef(node=f"p-{i}", incarnation="1", host=f"h{i}"),
        host=f"h{i}",
        cost=COST,
        queue_s=queue_s,
        assigned=assigned,
        local_blocks=local_blocks,
    )


def view(*candidates: Candidate, prompt_tokens: int = 1000, best: int = 0, number: int = 0) -> PolicyView:
    return PolicyView(
        prompt_tokens=prompt_tokens,
        block_tokens=16,
        block_bytes=1000,
        candidates=candidates,
        best_blocks=best,
        best_host="h9",
        links=LINKS,
        number=number,
    )


CANDIDATES = st.lists(
    st.builds(candidate, st.just(0), st.floats(0, 10), st.integers(0, 60), st.integers(0, 9)),
    min_size=1,
    max_size=8,
)
VIEWS = st.builds(
    lambda cs, best, number: view(*cs, best=best, number=number),
    CANDIDATES,
    st.integers(0, 62),
    st.integers(0, 99),
)


@pytest.mark.parametrize("policy_name", sorted(POLICIES))
class TestEveryPolicy:
    @given(seen=VIEWS)
    def test_names_a_candidate_with_true_predictions_and_a_reason(
        self, policy_name: str, seen: PolicyView
    ) -> None:
        choice = policy_named(policy_name, PolicyOptions()).place(seen)
        chosen = choice.candidate
        assert chosen in seen.candidates
        assert choice.reason
        assert choice.queue_s == chosen.queue_s
        assert choice.prefill_s == pytest.approx(compute_of(seen, chosen, choice.cached_blocks))
        assert choice.ttft_s == choice.queue_s + choice.transfer_s + choice.prefill_s
        if choice.remote:
            assert choice.cached_blocks == seen.best_blocks
        else:
            assert choice.cached_blocks == chosen.local_blocks
            assert choice.transfer_s == 0.0

    @given(seen=VIEWS)
    def test_decides_the_same_on_the_same(self, policy_name: str, seen: PolicyView) -> None:
        options = PolicyOptions(seed=3)
        assert policy_named(policy_name, options).place(seen) == policy_named(policy_name, options).place(
            seen
        )

    def test_takes_the_only_candidate(self, policy_name: str) -> None:
        assert (
            policy_named(policy_name, PolicyOptions()).place(view(candidate(4, 99.0))).candidate.ref.node
            == "p-4"
        )


def compute_of(seen: PolicyView, c: Candidate, prefix: int) -> float:
    """Computing what is behind the prefix, and loading as much of it as is held locally: a pull brings the rest."""
    whole = prefill_s(c.cost, seen.prompt_tokens, prefix * seen.block_tokens)
    return whole - c.cost.load_token_s * max(0, prefix - c.local_blocks) * seen.block_tokens


def algorithm_1(seen: PolicyView, threshold: float) -> tuple[int, bool, float]:
    """The paper's text, written out: index, whether remote, TTFT."""
    best: tuple[int, bool, float] | None = None
    for i, c in enumerate(seen.candidates):
        remote = seen.best_blocks > threshold * c.local_blocks
        prefix = seen.best_blocks if remote else c.local_blocks
        ttft = c.queue_s + compute_of(seen, c, prefix)
        if remote:
            ttft += transfer_s((prefix - c.local_blocks) * seen.block_bytes, LINKS.nic_bytes_s)
        if best is None or best[2] > ttft:
            best = (i, remote, ttft)
    assert best is not None
    return best


@given(seen=VIEWS, threshold=st.sampled_from([1.0, 1.5, 4.0]))
def test_kvcache_centric_is_algorithm_1(seen: PolicyView, threshold: float) -> None:
    i, remote, ttft = algorithm_1(seen, threshold)
    choice = KVCacheCentric(threshold).place(seen)
    assert choice.candidate is seen.candidates[i]
    assert (choice.remote, choice.ttft_s) == (remote, pytest.approx(ttft))


def cached(choice: Decision) -> tuple[int, bool]:
    return choice.cached_blocks, choice.remote


def test_kvcache_centric_at_the_threshold_recomputes_locally() -> None:
    place = KVCacheCentric(balancing_threshold=2.0).place
    assert cached(place(view(candidate(0, local_blocks=10), best=20))) == (10, False)
    assert cached(place(view(candidate(0, local_blocks=10), best=21))) == (21, True)
    assert cached(place(view(candidate(0), best=0))) == (0, False)
    assert cached(place(view(candidate(0), best=1))) == (1, True)


def test_cache_aware_never_pulls_and_weighs_queue_against_prefix() -> None:
    place = policy_named("cache_aware", PolicyOptions()).place
    near, idle = candidate(0, queue_s=0.3, local_blocks=50), candidate(1)
    assert place(view(near, idle, best=60)).candidate is near
    busier = candidate(0, queue_s=2.0, local_blocks=50)
    assert place(view(busier, idle, best=60)).candidate is idle


def test_load_balance_counts_prompts_and_takes_the_first_of_equals() -> None:
    place = policy_named("load_balance", PolicyOptions()).place
    choice = place(
        view(candidate(0, assigned=2), candidate(1, queue_s=50.0, assigned=1), candidate(2, assigned=1))
    )
    assert choice.candidate.ref.node == "p-1"


def test_random_draws_evenly_from_seed_and_number_alone() -> None:
    seen = [view(*(candidate(i) for i in range(4)), number=n) for n in range(2000)]
    counts = dict.fromkeys(("p-0", "p-1", "p-2", "p-3"), 0)
    one = policy_named("random", PolicyOptions(seed=1))
    for v in seen:
        counts[one.place(v).candidate.ref.node] += 1
    assert min(counts.values()) > 400
    other = policy_named("random", PolicyOptions(seed=2))
    assert [one.place(v).candidate.ref for v in seen] != [other.place(v).candidate.ref for v in seen]


@pytest.mark.parametrize("name", ["fastest", "no.such.module:Policy"])
def test_a_policy_that_nobody_registered_is_refused_by_name(name: str) -> None:
    with pytest.raises(Invalid, match=name):
        policy_named(name, PolicyOptions())
