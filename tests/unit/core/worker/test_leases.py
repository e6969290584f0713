"""Leases of gateways."""

from __future__ import annotations

from shared.core.worker.leases import GatewayLeases


def lapsed(leases: GatewayLeases, start_s: int, end_s: int) -> list[str]:
    """All that lapses while it is looked every second."""
    return [attempt for now in range(start_s, end_s + 1) for attempt in leases.lapsed(float(now))]


def test_a_lease_lasts_from_sign_to_sign() -> None:
    leases = GatewayLeases(10.0)
    assert leases.hold("g", "1", "a", 0.0)
    assert lapsed(leases, 0, 10) == []
    assert leases.seen("g", "1", 10.0) == []
    assert lapsed(leases, 11, 20) == []
    assert leases.lapsed(20.1) == ["a"]
    assert lapsed(leases, 21, 30) == []


def test_dropped_attempts_are_nobodys() -> None:
    leases = GatewayLeases(10.0)
    leases.hold("g", "1", "a", 0.0)
    leases.drop("g", "a")
    leases.drop("g", "a")
    leases.drop("x", "a")
    assert lapsed(leases, 0, 11) == []


def test_a_new_life_orphans_and_old_lives_stay_over() -> None:
    leases = GatewayLeases(10.0)
    leases.hold("g", "1", "a", 0.0)
    assert leases.seen("g", "2", 1.0) == ["a"]
    assert leases.seen("g", "1", 2.0) == []
    assert not leases.hold("g", "1", "b", 2.0)
    assert leases.hold("g", "2", "b", 2.0)
    assert leases.attempts() == {"b"}


def test_frozen_leases_do_not_age() -> None:
    leases = GatewayLeases(10.0)
    leases.hold("g", "1", "a", 0.0)
    leases.freeze()
    assert leases.lapsed(100.0) == []
    leases.thaw(100.0)
    assert lapsed(leases, 101, 110) == []
    assert leases.lapsed(110.1) == ["a"]


def test_a_pause_of_our_own_ends_no_lease() -> None:
    leases = GatewayLeases(10.0)
    leases.hold("g", "1", "a", 0.0)
    assert lapsed(leases, 0, 3) == []
    assert leases.lapsed(18.0) == [], "we were stopped for 15 s and heard nobody"
    assert lapsed(leases, 19, 28) == []
    assert leases.lapsed(28.1) == ["a"], "now it is silent"
