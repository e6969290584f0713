"""One rule says which spec a name stands for, whoever came first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.conductor.membership import Membership
from shared.core.conductor.node_registry import NodeRegistry
from shared.core.conductor.served_models import chosen_specs, kv_kind
from shared.protocol.cluster import CostCoefficients, NodeInfo
from shared.protocol.ids import NodeRef
from shared.protocol.model import ModelSpec
from tests.support.worlds.cluster_of import LAYOUT, SPEC

A = replace(SPEC, namespace=b"a" * 16)
B = replace(SPEC, namespace=b"b" * 16)
A_ELSEWHERE = replace(A, path="elsewhere")
A_WIDER = replace(A, layout=replace(LAYOUT, block_tokens=32))
OTHER_NAME = replace(B, name="other")
SPECS = (A, B, A_ELSEWHERE, A_WIDER, OTHER_NAME)


def info(node: str, model: ModelSpec | None, stage: Any = "ready") -> NodeInfo:
    role: Any = node.split("-")[0]
    return NodeInfo(NodeRef(node, "1"), role, stage, model=model)


def members(*infos: NodeInfo) -> Membership:
    known = Membership(2.0)
    for one in infos:
        known.announced(one, 0.0)
    return known


def chosen(*infos: NodeInfo) -> ModelSpec:
    return chosen_specs(members(*infos))["toy"]


NODES = st.lists(
    st.tuples(
        st.sampled_from(("prefill", "decode", "cache", "gateway")),
        st.sampled_from((*SPECS, None)),
        st.sampled_from(("ready", "ready", "warming", "draining")),
    ),
    max_size=8,
).map(lambda rows: [info(f"{role}-{i}", model, stage) for i, (role, model, stage) in enumerate(rows)])


@given(nodes=NODES, data=st.data())
def test_the_order_of_arrival_does_not_matter_for_rule_or_conductor(
    nodes: list[NodeInfo], data: st.DataObject
) -> None:
    here, there = members(*nodes), members(*data.draw(st.permutations(nodes)))
    specs = chosen_specs(here)
    assert specs == chosen_specs(there)
    groups = []
    for known in (here, there):
        registry = NodeRegistry(5.0, CostCoefficients())
        registry.rebuild(known)
        registry.check()
        groups.append({name: (group.spec, set(group.by_node)) for name, group in registry.groups.items()})
        for name, group in registry.groups.items():
            assert group.spec == specs[name]
            enrolled = [node_state.info.model for node_state in group.by_node.values()]
            assert all(model and kv_kind(model) == kv_kind(group.spec) for model in enrolled)
    assert groups[0] == groups[1]


def test_most_ready_nodes_win_and_ties_go_to_the_smallest_namespace() -> None:
    assert chosen(info("decode-0", B), info("decode-1", A)) == A
    assert chosen(info("decode-0", A), info("decode-1", B), info("decode-2", B)) == B
    assert chosen(info("decode-0", A), info("decode-1", B), info("decode-2", A, "warming")) == A
    assert chosen(info("decode-0", A, "warming"), info("decode-1", B)) == B


def test_nodes_without_a_ready_decode_node_come_last() -> None:
    assert chosen(info("prefill-0", A), info("prefill-1", A), info("decode-0", B)) == B


def test_nodes_whose_kv_is_interchangeable_count_together() -> None:
    assert chosen(info("decode-0", A), info("decode-1", A_ELSEWHERE), info("decode-2", A_ELSEWHERE),
                  info("decode-3", B), info("decode-4", B)) == A_ELSEWHERE  # fmt: skip


def test_who_is_lost_or_no_worker_has_no_say_and_before_anybody_is_ready_there_is_a_choice() -> None:
    known = members(info("decode-0", A), info("decode-1", A), info("cache-0", A))
    known.announced(info("decode-2", B), 2.0)
    known.ticked(3.0)
    assert chosen_specs(known) == {"toy": B}
    assert chosen(info("decode-0", B, "warming")) == B
    assert chosen_specs(members(info("decode-0", None), info("cache-0", A))) == {}


def test_a_rolling_upgrade_changes_it_once() -> None:
    for old, new in ((A, B), (B, A)):
        known = members(*(info(f"decode-{i}", old) for i in range(4)))
        seen = [old]
        for i in range(4):
            known.departed(f"decode-{i}", "1")
            seen.append(chosen_specs(known).get("toy", new))
            known.announced(NodeInfo(NodeRef(f"decode-{i}", "2"), "decode", "ready", model=new), 0.0)
            seen.append(chosen_specs(known)["toy"])
        assert sum(a != b for a, b in pairwise(seen)) == 1
