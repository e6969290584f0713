"""Feeds a recorded machine's events to it again, and compares its commands with the recorded ones.

A recording (a service's `--record FILE`) names its machine. Identical commands show that the decisions of a live
run came from the machine alone: no clock, chance or order of arrival outside the recording had a part in them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from shared.core import machine as machines
from shared.core.cache import events as cache_events
from shared.core.cache import machine as cache
from shared.core.cache.config import CacheConfig
from shared.core.conductor import events as conductor_events
from shared.core.conductor import machine as conductor
from shared.core.kv import block_events
from shared.core.machine import Command, Event, MachineMade
from shared.core.request import events as request_events
from shared.core.request import machine as lifecycle
from shared.core.worker import decode, prefill, steps, transfers
from shared.core.worker import events as worker
from shared.core.worker.config import DecodeConfig, PrefillConfig
from shared.io.plugins.policies import load_policies
from shared.io.recorder import read_recording
from tsukimi.errors import ToolError


class Replayable(Struct, frozen=True):
    machine: type
    config: type
    vocabulary: tuple[ModuleType, ...]
    """Modules that define its events and commands."""
    make: Callable[[Any], Any] | None = None
    """Makes the machine from its configuration; None: the class does."""


def _conductor(config: conductor_events.ConductorConfig) -> conductor.ConductorMachine:
    load_policies(config)
    return conductor.ConductorMachine(config)


MACHINES = {
    r.machine.__name__: r
    for r in (
        Replayable(
            conductor.ConductorMachine,
            conductor_events.ConductorConfig,
            (conductor_events, machines),
            _conductor,
        ),
        Replayable(cache.CacheMachine, CacheConfig, (cache_events, block_events, machines)),
        Replayable(prefill.PrefillMachine, PrefillConfig, (worker, steps, transfers, block_events, machines)),
        Replayable(decode.DecodeMachine, DecodeConfig, (worker, steps, transfers, block_events, machines)),
        Replayable(
            lifecycle.RequestMachine,
            request_events.ChoiceSetup,
            (request_events, machines),
            lambda setup: lifecycle.RequestMachine(setup.spec, setup.config),
        ),
    )
}


class Difference(Struct, frozen=True):
    """The first event that the machine answers differently."""

    record: int
    event: Any
    recorded: list[Any]
    replayed: list[Any]


class Replay(Struct):
    """How a replay went."""

    machine: str
    events: int = 0
    commands: int = 0
    restarts: int = 0
    difference: Difference | None = None


def replay(path: Path, *, check: bool = True) -> Replay:
    """Stops at the first difference. `check`: also check the machine's conservation laws at the end. Raises ToolError."""
    records = _records(path)
    first = next(records, None)
    if first is None or not isinstance(first[1], MachineMade):
        raise ToolError(f"{path} is not the recording of a machine.")
    result = Replay(machine=first[1].machine, restarts=-1)
    machine: Any = None
    for number, (now, event, recorded) in enumerate(_chain(first, records)):
        if isinstance(event, MachineMade):
            machine = _made(event)
            result.restarts += 1
            continue
        replayed = machine.handle(event, now)
        result.events += 1
        result.commands += len(recorded)
        if msgspec.msgpack.encode(replayed) != msgspec.msgpack.encode(recorded):
            result.difference = Difference(number, event, recorded, replayed)
            return result
    if check:
        machine.check()
    return result


def summary(result: Replay) -> str:
    restarts = f", {result.restarts} restarts" if result.restarts else ""
    return f"{result.machine}: {result.events} events, {result.commands} commands{restarts}"


def explain(difference: Difference) -> str:
    return (
        f"record {difference.record} is answered otherwise.\n"
        f"  event    {difference.event}\n  recorded {difference.recorded}\n  replayed {difference.replayed}"
    )


Record = tuple[float, Any, list[Any]]


def _records(path: Path) -> Iterator[Record]:
    """The records, decoded with the types of the machine that the recording begins with."""
    try:
        _, event, _ = next(read_recording(path, Any, Any))
        name = event["machine"]
    except (StopIteration, msgspec.MsgspecError, KeyError, TypeError) as e:
        raise ToolError(f"{path} is not the recording of a machine.") from e
    except OSError as e:
        raise ToolError(f"{path}: {e.strerror}.") from e
    if name not in MACHINES:
        raise ToolError(f"{path} is of a {name}; there are {', '.join(MACHINES)}.")
    modules = MACHINES[name].vocabulary
    events = _union(Event, modules) | MachineMade
    yield from read_recording(path, events, _union(Command, modules))


def _union(base: type, modules: tuple[ModuleType, ...]) -> Any:
    found = {
        cls: None
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    }
    return functools.reduce(operator.or_, found)


def _made(event: MachineMade) -> Any:
    kind = MACHINES[event.machine]
    config: Any = msgspec.msgpack.decode(event.config, type=kind.config)
    return kind.machine(config) if kind.make is None else kind.make(config)


def _chain(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest
