from __future__ import annotations

from shared.core.conductor.membership import Change, Membership
from shared.protocol.cluster import NodeInfo, NodeLoad, Stage
from shared.protocol.ids import NodeRef, Role


def info(node: str = "d-0", life: str = "1", stage: Stage = "ready", role: Role = "decode") -> NodeInfo:
    return NodeInfo(ref=NodeRef(node=node, incarnation=life), role=role, stage=stage)


def load(node: str = "d-0", life: str = "1", seq: int = 1, stage: Stage = "ready") -> NodeLoad:
    return NodeLoad(node=node, incarnation=life, role="decode", seq=seq, stage=stage)


def tick(members: Membership, start_s: float, end_s: float) -> list[Change]:
    """All the changes of ticks four times a second."""
    changes: list[Change] = []
    while start_s <= end_s:
        changes += members.ticked(start_s)
        start_s += 0.25
    return changes


def kinds(changes: list[Change]) -> list[str]:
    return [f"{c.kind}:{c.ref.node}:{c.ref.incarnation}:{c.stage}" for c in changes]


def test_only_ready_nodes_get_work() -> None:
    members = Membership(2.0)
    assert kinds(members.announced(info(stage="loading"), 0.0)) == ["joined:d-0:1:loading"]
    assert members.ready("decode") == []
    assert kinds(members.announced(info(stage="ready"), 1.0)) == ["stage:d-0:1:ready"]
    assert [m.ref.node for m in members.ready("decode")] == ["d-0"]
    assert members.ready("prefill") == []
    assert kinds(members.loaded(load(stage="draining"), 1.5)) == ["stage:d-0:1:draining"]
    assert members.announced(info(stage="ready"), 1.6) == []
    assert members.ready("decode") == []
    members.check()


def test_a_new_life_ends_the_old_and_late_messages_of_it_are_ignored() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    members.loaded(load(seq=7), 0.5)
    changes = members.announced(info(life="2", stage="loading"), 1.0)
    assert kinds(changes) == ["left:d-0:1:ready", "joined:d-0:2:loading"]
    assert members.announced(info(life="1"), 1.1) == []
    assert members.loaded(load(life="1", seq=8), 1.2) == []
    assert members.departed("d-0", "1") == []
    assert members.is_current("d-0", "2")
    assert not members.is_current("d-0", "1")
    member = members.get("d-0")
    assert member is not None
    assert member.load is None
    assert not members.strangers
    members.check()


def test_a_silent_node_is_lost_and_returns_when_heard() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    assert members.ticked(2.0) == []
    assert kinds(members.ticked(2.1)) == ["lost:d-0:1:ready"]
    assert members.ticked(2.2) == []
    assert members.ready("decode") == []
    assert kinds(members.loaded(load(), 3.0)) == ["returned:d-0:1:ready"]
    assert len(members.ready("decode")) == 1
    assert members.ticked(4.9) == []


def test_a_lost_node_is_forgotten_in_the_end() -> None:
    members = Membership(2.0, forget_after_s=10.0)
    members.announced(info(), 0.0)
    tick(members, 0.0, 9.9)
    assert [m.alive for m in members] == [False]
    tick(members, 10.0, 10.5)
    assert list(members) == []


def test_the_own_bus_down_is_not_everyones_death() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    members.bus_lost()
    assert members.ticked(100.0) == []
    members.bus_found(100.0)
    assert tick(members, 100.2, 101.9) == []
    assert kinds(members.ticked(102.1)) == ["lost:d-0:1:ready"]


def test_a_pause_of_our_own_is_not_everyones_death() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    tick(members, 0.0, 1.0)
    assert members.ticked(16.0) == [], "we were stopped for 15 s and heard nobody"
    assert tick(members, 16.2, 17.9) == []
    assert kinds(tick(members, 18.1, 18.3)) == ["lost:d-0:1:ready"], "now it is silent"


def test_a_life_that_is_heard_after_its_leave_has_not_left() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    members.loaded(load(seq=5), 0.5)
    assert kinds(members.departed("d-0", "1")) == ["left:d-0:1:ready"]
    assert members.loaded(load(seq=5), 0.6) == []
    assert not members.strangers, "that was on its way before"
    assert members.announced(info(), 0.7) == []
    members.loaded(load(seq=6), 1.0)
    assert members.strangers, "it is asked who it is"
    assert kinds(members.announced(info(), 1.1)) == ["joined:d-0:1:ready"]
    members.check()


def test_a_life_that_was_replaced_stays_ended_whatever_it_sends() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    members.departed("d-0", "1")
    members.announced(info(life="2"), 1.0)
    members.loaded(load(seq=99), 1.5)
    assert not members.strangers
    assert members.announced(info(), 1.6) == []


def test_a_leave_of_a_life_that_is_not_there_is_ignored() -> None:
    members = Membership(2.0)
    assert members.departed("d-0", "1") == []
    members.announced(info(), 0.0)
    assert members.departed("d-0", "0") == []
    assert [m.ref.incarnation for m in members.ready("decode")] == ["1"]


def test_a_heartbeat_without_announcement_calls_for_a_roll_call() -> None:
    members = Membership(2.0)
    assert members.loaded(load(), 0.0) == []
    assert members.strangers
    assert list(members) == []


def test_heartbeats_out_of_order_show_life_but_not_load() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    members.loaded(load(seq=5), 1.0)
    assert members.loaded(load(seq=4, stage="loading"), 2.5) == []
    assert members.ticked(4.0) == []
    member = members.get("d-0")
    assert member is not None
    assert member.load is not None
    assert member.load.seq == 5


def test_a_graceful_end_is_at_once() -> None:
    members = Membership(2.0)
    members.announced(info(), 0.0)
    assert kinds(members.departed("d-0", "1")) == ["left:d-0:1:ready"]
    assert members.loaded(load(seq=9), 0.1) == []
    assert list(members) == []
    members.check()
