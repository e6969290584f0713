"""Leases of gateways."""

from __future__ import annotations

from shared.core.worker.leases import GatewayLeases


def test_a_lease_lasts_from_sign_to_sign() -> None:
    leases = GatewayLeases(10.0)
    assert leases.hold("g", "1", "a", 0.0)
    assert leases.lapsed(10.0) == []
    assert leases.seen("g", "1", 10.0) == []
    assert leases.lapsed(20.0) == []
    assert leases.lapsed(20.1) == ["a"]
    assert leases.lapsed(30.0) == []


def test_dropped_attempts_are_nobodys() -> None:
    leases = GatewayLeases(10.0)
    leases.hold("g", "1", "a", 0.0)
    leases.drop("g", "a")
    leases.drop("g", "a")
    leases.drop("x", "a")
    assert leases.lapsed(11.0) == []


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
    assert leases.lapsed(110.0) == []
    assert leases.lapsed(110.1) == ["a"]
