"""Prefill and decode machines together, with everything late, reordered, repeated, lost or failing."""

from __future__ import annotations

import pytest

from shared.core.machine import Ticked
from shared.core.worker import events as w
from tests.support.worlds.worker_owner import Owner
from tests.support.worlds.worker_world import World, reference


def requests(world: World, count: int) -> None:
    """Submit prompts that share prefixes. Their lengths vary around block boundaries."""
    head = [world.rng.randrange(90) for _ in range(16)]
    for _ in range(count):
        prompt = head[: world.rng.randrange(17)] + [
            world.rng.randrange(90) for _ in range(world.rng.randint(1, 9))
        ]
        owner = Owner(world, f"r{len(world.owners)}", prompt, world.rng.randint(1, 14))
        world.owners.append(owner)
        owner.place()


def check_rest(world: World) -> None:
    for owner in world.owners:
        assert owner.done, f"{owner.name} never ended"
        if not owner.cancelled:
            assert owner.tokens == reference(owner.prompt, owner.wanted)
    for node in (world.prefill, world.decode):
        assert node.machine.pool.held == 0
        assert node.machine.attempts() == ()
        assert not node.handoffs
        assert not node.puts
    assert world.landings == {}


@pytest.mark.parametrize("seed", range(6))
def test_all_is_well_whatever_the_order(seed: int) -> None:
    world = World(seed, trouble=0.0)
    requests(world, 10)
    world.run()
    check_rest(world)
    moved = world.decode.machine.counters["ended_moved"] + world.prefill.machine.counters["ended_moved"]
    assert moved == world.decode.machine.counters.get("preempted", 0), "nothing else was given up"


@pytest.mark.parametrize("seed", range(30))
def test_and_3_5_no_fault_changes_a_token(seed: int) -> None:
    world = World(seed, trouble=0.08)
    requests(world, 10)
    world.run()
    check_rest(world)
    for node in (world.prefill, world.decode):
        assert node.machine.counters["late_ignored"], "nothing came late or twice: this was no test"


@pytest.mark.parametrize("seed", range(20))
def test_cancels_at_any_moment_leave_nothing_behind(seed: int) -> None:
    world = World(seed, trouble=0.02, pages=16)
    requests(world, 4)
    for _ in range(40):
        for _ in range(world.rng.randrange(60)):
            world.step()
        world.rng.choice(world.owners).cancel()
        requests(world, 1)
    world.run()
    check_rest(world)


@pytest.mark.parametrize("seed", range(10))
def test_a_drain_ends_whatever_is_going_on(seed: int) -> None:
    world = World(seed, trouble=0.03)
    requests(world, 8)
    for _ in range(world.rng.randrange(200)):
        world.step()
    for owner in world.owners:
        if world.rng.random() < 0.5:
            owner.cancel()
    for node in (world.prefill, world.decode):
        node.feed(w.DrainStarted(0.5))
    for _ in range(2000):
        if not world.step():
            break
        world.now += 0.01
        if world.rng.random() < 0.05:
            for node in (world.prefill, world.decode):
                node.feed(Ticked())
        for owner in world.owners:
            if owner.attempts > 1:
                owner.cancel()  # there is no other node to go to
    world.now += 10
    for node in (world.prefill, world.decode):
        node.feed(Ticked())
    for owner in world.owners:
        owner.cancel()
    world.run()
    assert world.prefill.drained
    assert world.decode.drained


@pytest.mark.parametrize("seed", range(6))
def test_few_pages_slow_things_down_but_nothing_more(seed: int) -> None:
    world = World(seed, trouble=0.0, pages=11)
    requests(world, 8)
    world.run()
    check_rest(world)
    assert world.decode.machine.counters["preempted"], "there were pages enough: this was no test"
