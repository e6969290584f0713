from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.decode_policies import (
    DECODE_POLICIES,
    DecodeCandidate,
    DecodeView,
    decode_policy_named,
    predicted_tbt_s,
)
from shared.core.conductor.events import ConductorConfig
from shared.core.conductor.machine import ConductorMachine
from shared.core.conductor.policy_options import PolicyOptions
from shared.protocol.cluster import CostCoefficients
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef

COST = CostCoefficients(step_fixed_s=0.01, step_request_s=0.001, step_token_s=1e-6)


def candidate(i: int, requests: int = 0, kv_tokens: int = 0, free_blocks: int = 100) -> DecodeCandidate:
    return DecodeCandidate(NodeRef(f"d-{i}", "1"), f"h{i}", COST, requests, kv_tokens, free_blocks, 0)


def chosen(*candidates: DecodeCandidate, blocks: int = 10) -> str:
    policy = decode_policy_named("least_tbt", PolicyOptions())
    return policy.choose(DecodeView(160, blocks, candidates)).ref.node


def test_the_node_with_the_shortest_step_goes_on() -> None:
    assert chosen(candidate(0, requests=5), candidate(1, requests=2), candidate(2, kv_tokens=90_000)) == "d-1"


def test_equal_nodes_go_in_order() -> None:
    assert chosen(candidate(0), candidate(1)) == "d-0"


def test_a_node_without_room_is_taken_only_where_none_has_any() -> None:
    full, busy = candidate(0, free_blocks=3), candidate(1, requests=5)
    assert chosen(full, busy) == "d-1"
    assert chosen(full, candidate(1, requests=5, free_blocks=2)) == "d-0"


CANDIDATES = st.lists(
    st.builds(candidate, st.integers(0, 99), st.integers(0, 9), st.integers(0, 9999), st.integers(0, 20)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", sorted(DECODE_POLICIES))
@given(candidates=CANDIDATES, blocks=st.integers(1, 20))
def test_every_policy_names_a_candidate_and_the_same_view_gives_the_same_choice(
    name: str, candidates: list[DecodeCandidate], blocks: int
) -> None:
    view = DecodeView(160, blocks, candidates)
    policy = decode_policy_named(name, PolicyOptions())
    assert policy.choose(view) in candidates
    assert policy.choose(view) is policy.choose(view)
    assert view.tbt_s(candidates[0]) == predicted_tbt_s(candidates[0], 160)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(Invalid, match="least_tbt") as caught:
        ConductorMachine(ConductorConfig(decode_policy="nonesuch"))
    assert caught.value.param == "decode_policy"
