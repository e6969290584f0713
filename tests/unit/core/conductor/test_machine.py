from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from shared.core.conductor.events import (
    AskSnapshot,
    CallRoll,
    ConductorStarted,
    NodeAnnounced,
    NodeDeparted,
    NoticeNode,
    SnapshotArrived,
)
from shared.core.conductor.placement_policies import POLICIES
from shared.core.machine import BusFound, BusLost, Ticked
from shared.protocol.cluster import BlockSnapshotPart, NodeInfo
from tests.support.worlds.cluster_of import COST, LAYOUT, SPEC, ClusterOf, keys, names, ref

HEAD = keys(*range(128))


def notices(cluster: ClusterOf, what: str) -> list[str]:
    return [c.ref.node for c in cluster.commands if isinstance(c, NoticeNode) and c.what == what]


# -- lives -------------------------------------------------------------------------------------------------------------


def test_a_node_that_failed_is_passed_over_until_it_is_heard_again() -> None:
    cluster = ClusterOf(1, 2)
    assert names(cluster.place(attempt="a/0/0"))[1] == "d-0"
    retried = cluster.place(attempt="a/0/1", avoid=(("d-0", "1"),), retry=True)
    assert names(retried)[1] == "d-1"
    assert notices(cluster, "suspect") == ["d-0"]
    for i in range(10):
        assert names(cluster.place(attempt=f"b{i}/0/0"))[1] == "d-1"
    cluster.report("d-0", "decode")
    assert names(cluster.place(attempt="c/0/0"))[1] == "d-0"


def test_a_lone_node_that_failed_is_still_better_than_none() -> None:
    cluster = ClusterOf(1, 1)
    assert names(cluster.place(avoid=(("d-0", "1"), ("p-0", "1")), retry=True)) == ("p-0", "d-0")


def test_a_silent_node_gets_nothing() -> None:
    cluster = ClusterOf(1, 2)
    cluster.now += 1.5
    for node, role in (("p-0", "prefill"), ("d-1", "decode")):
        cluster.report(node, role)  # type: ignore[arg-type]
    cluster.now += 1.0
    cluster.feed(Ticked())
    assert notices(cluster, "lost") == ["d-0"]
    assert {names(cluster.place(attempt=f"a{i}/0/0"))[1] for i in range(5)} == {"d-1"}


def test_a_new_life_holds_nothing_and_owes_nothing() -> None:
    cluster = ClusterOf(1, 1, 1)
    cluster.stored("c-0", HEAD[:10])
    cluster.join("c-0", "cache", life="2")
    placement = cluster.place(16 * 20, keys(*range(20)))
    assert placement.cached_blocks == 0
    assert placement.pool == ref("c-0", "h0", "2")


def test_a_node_that_leaves_or_drains_gets_nothing() -> None:
    cluster = ClusterOf(1, 3)
    cluster.feed(NodeDeparted("d-0", "1"))
    cluster.report("d-1", "decode", stage="draining")
    assert {names(cluster.place(attempt=f"a{i}/0/0"))[1] for i in range(5)} == {"d-2"}


def test_a_node_with_another_namespace_is_told_of_and_gets_no_work() -> None:
    cluster = ClusterOf(1, 1)
    other = NodeInfo(
        ref=ref("d-9", "g9"),
        role="decode",
        stage="ready",
        model=SPEC.__class__(
            name="toy",
            path="toy",
            vocab_size=256,
            context_tokens=64,
            eos_token_ids=(0,),
            layout=LAYOUT,
            namespace=b"m" * 16,
        ),
        cost=COST,
    )
    cluster.feed(NodeAnnounced(other))
    cluster.feed(NodeAnnounced(other))
    assert notices(cluster, "foreign") == ["d-9"]
    assert {names(cluster.place(attempt=f"a{i}/0/0"))[1] for i in range(5)} == {"d-0"}


def test_of_two_specs_of_a_name_the_most_ready_nodes_get_work_whoever_joined_first() -> None:
    other = replace(SPEC, namespace=b"z" * 16)
    cluster = ClusterOf(0, 1)
    assert names(cluster.place(retry=True)) == (None, "d-0")
    cluster.join("d-1", "decode", model=other)
    assert names(cluster.place(retry=True)) == (None, "d-0")
    assert notices(cluster, "foreign") == ["d-1"]
    cluster.join("p-1", "prefill", model=other)
    assert names(cluster.place()) == ("p-1", "d-1")
    assert notices(cluster, "foreign") == ["d-1", "d-0"]
    cluster.feed(NodeDeparted("d-1", "1"))
    assert names(cluster.place(retry=True)) == (None, "d-0")


def test_a_restarted_conductor_is_complete_after_one_round() -> None:
    cluster = ClusterOf(0, 0)
    assert cluster.feed(ConductorStarted()) == [CallRoll()]
    cluster.join("p-0", "prefill")
    cluster.join("d-0", "decode")
    cluster._event_seqs["c-0"] = 7
    asked = cluster.join("c-0", "cache")
    assert AskSnapshot("c-0") in asked
    part = BlockSnapshotPart(node="c-0", incarnation="1", seq=7, part=0, parts=1, keys=HEAD[:10])
    cluster.feed(SnapshotArrived(part))
    assert cluster.place(16 * 20, keys(*range(20))).cached_blocks == 10


def test_a_stranger_is_called_to_announce_itself() -> None:
    cluster = ClusterOf(0, 0)
    assert cluster.report("d-0", "decode") == [CallRoll()]
    assert cluster.report("d-0", "decode") == []
    cluster.now += 1.0
    assert cluster.report("d-0", "decode") == [CallRoll()]


def test_a_gap_asks_for_a_snapshot() -> None:
    cluster = ClusterOf(1, 1, 1)
    cluster.stored("c-0", HEAD[:1])
    cluster._event_seqs["c-0"] += 1
    cluster.now += 10.0
    cluster.stored("c-0", HEAD[2:3])
    assert cluster.commands[-1] == AskSnapshot("c-0")


def test_the_own_bus_down_is_not_everyones_death() -> None:
    cluster = ClusterOf(1, 1)
    cluster.feed(BusLost())
    cluster.now += 60.0
    cluster.feed(Ticked())
    assert cluster.feed(BusFound()) == [CallRoll()]
    cluster.now += 1.0
    cluster.feed(Ticked())
    assert names(cluster.place()) == ("p-0", "d-0")


# -- balance -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_shared_head_does_not_send_all_to_one_node(policy: str) -> None:
    """1,000 prompts with the same 2k-token head: every node computes what it is given, and then holds it."""
    cluster = ClusterOf(4, 4, 4, policy=policy)
    load: Counter[str] = Counter()
    busy_until = dict.fromkeys(("p-0", "p-1", "p-2", "p-3"), cluster.now)
    for i in range(1000):
        cluster.now += 0.02
        tail = keys(10_000 + i * 4, 10_001 + i * 4, 10_002 + i * 4, 10_003 + i * 4)
        placement = cluster.place(132 * 16, HEAD + tail, attempt=f"r{i}/0/0")
        node = names(placement)[0]
        assert node is not None
        assert placement.pool is not None
        load[node] += 1
        busy_until[node] = max(busy_until[node], cluster.now) + placement.predicted.prefill_s
        cluster.stored(placement.pool.node, HEAD + tail)
        for name, until in busy_until.items():
            cluster.report(name, "prefill", queue_s=max(0.0, until - cluster.now), attempts=(f"r{i}/0/0",))
        for d in range(4):
            cluster.report(f"d-{d}", "decode")
    cluster.machine.check()
    assert max(load.values()) / (sum(load.values()) / 4) < 1.3


def test_after_a_mass_cancel_a_node_gets_work_again() -> None:
    cluster = ClusterOf(2, 2)
    full = tuple(f"x{i}/0/0" for i in range(50))
    cluster.report("d-0", "decode", attempts=full, batch_tokens=10**6, kv_blocks_held=4096)
    cluster.report("p-0", "prefill", attempts=full, queue_s=500.0)
    assert names(cluster.place(attempt="a/0/0")) == ("p-1", "d-1")
    cluster.report("d-0", "decode")
    cluster.report("p-0", "prefill")
    assert names(cluster.place(attempt="b/0/0")) == ("p-0", "d-0")


def test_an_old_report_decays_and_so_do_assignments_nobody_reports() -> None:
    cluster = ClusterOf(1, 1, lost_after_s=1e9)
    cluster.report("d-0", "decode", attempts=("x/0/0",), batch_tokens=10**6)
    assert cluster.place(100, attempt="a/0/0").predicted.tbt_s > 1.0
    cluster.now += 6.0
    assert cluster.place(100, attempt="b/0/0").predicted.tbt_s == pytest.approx(0.02 + 0.001 + 100e-6)
