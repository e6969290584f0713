from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from shared.core.machine import Command, Event
from shared.io.driver import Driver
from shared.io.recorder import Recorder, read_recording
from tests.support.worlds.virtual_time import Deadlock, run


class Happened(Event, frozen=True):
    n: int


class Do(Command, frozen=True):
    n: int


class Recording:
    """Answers event n with the commands of `plan[n]`."""

    def __init__(self, plan: dict[int, list[int]]) -> None:
        self.plan = plan
        self.seen: list[tuple[int, float]] = []

    def handle(self, event: Happened, now: float) -> list[Any]:
        if event.n == 13:
            raise KeyError("unlucky")
        self.seen.append((event.n, now))
        return [Do(n) for n in self.plan.get(event.n, [])]

    def check(self) -> None: ...


def test_commands_run_in_order_and_events_made_meanwhile_wait_their_turn() -> None:
    async def main() -> None:
        done: list[int] = []
        machine = Recording({1: [10, 11], 10: [20]})

        def execute(command: Do) -> Happened | None:
            done.append(command.n)
            return Happened(command.n) if command.n < 20 else None

        async with asyncio.TaskGroup() as tasks:
            Driver(machine, execute, tasks=tasks).feed(Happened(1))
        assert done == [10, 11, 20]
        assert [n for n, _ in machine.seen] == [1, 10, 11]

    run(main())


def test_execute_may_feed_without_reentering_the_machine() -> None:
    async def main() -> None:
        depth = 0
        machine = Recording({1: [2, 3]})

        def execute(command: Do) -> None:
            nonlocal depth
            depth += 1
            assert depth == 1
            driver.feed(Happened(command.n))
            depth -= 1

        async with asyncio.TaskGroup() as tasks:
            driver = Driver(machine, execute, tasks=tasks)
            driver.feed(Happened(1))
        assert [n for n, _ in machine.seen] == [1, 2, 3]

    run(main())


def test_an_awaitable_is_run_beside_the_others_and_its_event_fed_when_done() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        machine = Recording({1: [30, 5]})

        async def later(n: int) -> Happened:
            await asyncio.sleep(n)
            return Happened(100 + n)

        async with asyncio.TaskGroup() as tasks:
            Driver(machine, lambda c: later(c.n), tasks=tasks, clock=loop.time).feed(Happened(1))
        assert machine.seen == [(1, 0.0), (105, 5.0), (130, 30.0)]

    run(main())


def test_now_never_decreases() -> None:
    async def main() -> None:
        times = iter([5.0, 3.0, 4.0, 9.0])
        machine = Recording({})
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(machine, lambda c: None, tasks=tasks, clock=lambda: next(times))
            for n in range(3):
                driver.feed(Happened(n))
        assert [t for _, t in machine.seen] == [5.0, 5.0, 9.0]

    run(main())


def test_an_exception_of_the_machine_ends_the_task_group_and_the_machine_is_never_fed_again() -> None:
    async def main() -> None:
        machine = Recording({})
        with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="unlucky")):
            async with asyncio.TaskGroup() as tasks:
                driver = Driver(machine, lambda c: None, tasks=tasks)
                with pytest.raises(KeyError):
                    driver.feed(Happened(13))
                with pytest.raises(RuntimeError, match="broken"):
                    driver.feed(Happened(1))
                await asyncio.sleep(3600)
        assert machine.seen == []

    run(main())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_of_a_command_ends_the_task_group(asynchronous: bool) -> None:
    def fail(command: Do) -> Any:
        async def soon() -> None:
            raise OSError("disk on fire")

        if asynchronous:
            return soon()
        raise OSError("disk on fire")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(Recording({1: [1]}), fail, tasks=tasks)
            with contextlib.suppress(OSError):
                driver.feed(Happened(1))
            await asyncio.sleep(3600)

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="on fire")):
        run(main())


def test_tick_feeds_in_virtual_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        machine = Recording({})
        async with asyncio.TaskGroup() as tasks:
            driver = Driver(machine, lambda c: None, tasks=tasks, clock=loop.time)
            ticking = tasks.create_task(driver.tick(Happened(0), 0.25))
            await asyncio.sleep(3600.1)
            ticking.cancel()
        assert len(machine.seen) == 4 * 3600

    run(main())


def test_virtual_time_reports_a_deadlock_instead_of_hanging() -> None:
    async def main() -> None:
        await asyncio.sleep(10)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"10\.0"):
        run(main())


def test_a_recorded_run_replayed_gives_the_same_commands(tmp_path: Path) -> None:
    plan = {1: [10, 11], 10: [20], 11: [21, 22]}

    async def main() -> None:
        recorder = Recorder(tmp_path / "log")

        async def later(command: Do) -> Happened:
            await asyncio.sleep(command.n / 7)
            return Happened(command.n)

        async with asyncio.TaskGroup() as tasks:
            clock = asyncio.get_running_loop().time
            driver = Driver(Recording(plan), later, tasks=tasks, recorder=recorder, clock=clock)
            driver.feed(Happened(1))
        recorder.close()

    run(main())
    replayed = Recording(plan)
    records = list(read_recording(tmp_path / "log", Happened, Do))
    assert [event.n for _, event, _ in records] == [1, 10, 11, 20, 21, 22]
    for now, event, commands in records:
        assert replayed.handle(event, now) == commands
