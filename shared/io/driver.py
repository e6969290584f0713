"""Feeds one machine from the live world and carries out its commands.

The driver decides nothing. It runs `handle` and the commands that come back one event at a time, in order; an event
made meanwhile waits its turn. An exception from the machine or from `execute` is a bug: it is logged with its
traceback and ends the process through the task group, because a machine whose commands were only partly carried out is
broken. An owner that can go on without the machine passes `on_bug`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import structlog

from shared.core.machine import Machine, MachineMade

E = TypeVar("E")

Outcome = Any
"""What carrying out a command gives: None, an event, or an awaitable of one of those (run as a task)."""

log = structlog.get_logger(__name__)


class EventLog(Protocol):
    """Where a driver records events and commands (io.recorder.Recorder)."""

    def record(self, now: float, event: Any, commands: Sequence[Any]) -> None: ...


class TaskOwner(Protocol):
    """Runs the awaitables that commands start, as asyncio.TaskGroup does. Raises RuntimeError if it takes no more."""

    def create_task(self, coro: Coroutine[Any, Any, None], /) -> object: ...


class Driver(Generic[E]):
    """Owns a machine on one event loop. Not thread-safe: from other threads use `loop.call_soon_threadsafe(feed, e)`.

    `tasks` owns the awaitables that commands start; they end or are cancelled before it ends. A recording begins with
    MachineMade if there is a `setup` (default: the machine's `config`), so that a replay can make it again.

    With `on_bug`, a bug is given to it and the driver does nothing else about it: it does not log, raise or end the
    process. The event's remaining commands are dropped. Events that wait, and later ones, are still handled.
    """

    def __init__(
        self,
        machine: Machine[E],
        execute: Callable[[Any], Outcome],
        *,
        tasks: TaskOwner,
        recorder: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        setup: Any = None,
        on_bug: Callable[[Exception], None] | None = None,
    ) -> None:
        self.machine = machine
        self._execute = execute
        self._tasks = tasks
        self._recorder = recorder
        self._clock = clock
        self._on_bug = on_bug
        self._now = clock()
        self._events: deque[E] = deque()
        self._feeding = False
        self._bug: BaseException | None = None
        if setup is None:
            setup = getattr(machine, "config", None)
        if recorder is not None and setup is not None:
            made = MachineMade(machine=type(machine).__name__, config=msgspec.msgpack.encode(setup))
            recorder.record(self._now, made, [])

    def feed(self, event: E) -> None:
        """Handle the event now, or after the events before it when called from within a command.

        Without `on_bug`: raises what the machine or a command raised; from then on every call raises, as the process is
        ending.
        """
        if self._bug is not None:
            raise RuntimeError("the machine is broken by an earlier exception") from self._bug
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                try:
                    self._step(self._events.popleft())
                except Exception as bug:
                    if self._on_bug is None:
                        self._crash(bug)
                        raise
                    self._on_bug(bug)
        finally:
            self._feeding = False

    async def tick(self, event: E, every_s: float) -> None:
        """Feed `event` at this interval in seconds, without end; run it in the task group."""
        while True:
            await asyncio.sleep(every_s)
            self.feed(event)

    def _step(self, event: E) -> None:
        self._now = max(self._now, self._clock())
        commands = self.machine.handle(event, self._now)
        if self._recorder is not None:
            self._recorder.record(self._now, event, commands)
        for command in commands:
            outcome = self._execute(command)
            if outcome is None:
                continue
            if inspect.isawaitable(outcome):
                self._start(self._finish(command, outcome))
            else:
                self._events.append(outcome)

    async def _finish(self, command: Any, outcome: Awaitable[E | None]) -> None:
        try:
            event = await outcome
        except Exception as bug:
            if self._on_bug is not None:
                self._on_bug(bug)
                return
            log.exception("command_failed", command=type(command).__name__)
            self._bug = self._bug or bug
            raise
        if event is not None and self._bug is None:
            self.feed(event)

    def _crash(self, bug: Exception) -> None:
        log.error("machine_failed", machine=type(self.machine).__name__, exc_info=bug)
        self._bug = bug
        self._events.clear()
        self._start(_raise(bug))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the group is ending and takes no more tasks: nobody needs the outcome
            work.close()


async def _raise(bug: Exception) -> None:
    raise bug
