"""One choice's shell: commands in order, events in turn, and a bug that stays with the choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.api.answer import Update
from services.gateway.generation.answer_text import AnswerText
from services.gateway.generation.choice import Choice
from services.gateway.generation.stop import StopFinder
from shared.core.machine import Command, Event, Ticked
from shared.core.request import events as ev
from shared.core.request.machine import RequestMachine
from shared.io.recorder import Recorder
from shared.protocol.errors import TsukimiError
from shared.protocol.sampling import SamplingParams
from tsukimi.replay import replay

SPEC = ev.ChoiceSpec(
    request="r",
    choice=0,
    model="m",
    namespace=b"",
    block_tokens=16,
    prompt_tokens=1,
    prompt=b"\0\0\0\0",
    block_keys=(),
    max_new_tokens=8,
    sampling=SamplingParams(),
)


class Letters:
    """Token n is the nth letter."""

    def push(self, token: int) -> str:
        return chr(ord("A") + token)

    def finish(self) -> str:
        return ""


class Scripted:
    """Answers an event with the commands of `plan`, by the event's type; an exception there is raised."""

    spec, config, phase = SPEC, ev.LifecycleConfig(), "running"

    def __init__(self, trace: list[str], plan: dict[type[Event], list[Command] | Exception]) -> None:
        self.trace, self.plan = trace, plan

    def handle(self, event: Event, now: float) -> list[Any]:
        self.trace.append(type(event).__name__)
        commands = self.plan.get(type(event), [])
        if isinstance(commands, Exception):
            raise commands
        return commands


class NodeClient:
    """Nodes whose answers are a bug of ours."""

    async def place(self, command: ev.AskPlace) -> Event:
        raise KeyError("no such subject")


CANCEL = ev.Cancel("node", "r/0/0", "enough")


class World:
    def __init__(self, plan: dict[type[Event], Any], machine: Any = None, recorder: Recorder | None = None):
        self.trace: list[str] = []
        self.errors: list[TsukimiError] = []
        self.when_told: Callable[[], None] = lambda: None
        self.choice = Choice(
            0,
            machine or Scripted(self.trace, plan),
            AnswerText(Letters(), StopFinder(("B",))),  # type: ignore[arg-type]
            NodeClient(),  # type: ignore[arg-type]
            cancel=lambda command: self.trace.append("cancel"),
            told=self._told,
            failed=self.errors.append,
            recorder=recorder,
        )

    def _told(self, update: Update) -> None:
        self.trace.append(f"told {update.text or update.finish}")
        self.when_told()


async def test_a_stop_met_in_a_command_waits_until_the_other_commands_are_carried_out() -> None:
    world = World({ev.Started: [ev.Deliver(0, (0, 1)), CANCEL], ev.StopMet: [CANCEL, CANCEL]})
    world.choice.feed(ev.Started())
    assert world.trace == ["Started", "told A", "cancel", "StopMet", "cancel", "cancel"]


async def test_an_event_fed_by_who_is_told_waits_its_turn_and_nothing_more_is_told() -> None:
    world = World({ev.Started: [ev.Deliver(0, (0,)), ev.Deliver(1, (2,)), CANCEL]})
    world.when_told = lambda: world.choice.feed(ev.ClientGone("slow"))
    world.choice.feed(ev.Started())
    assert world.trace == ["Started", "told A", "cancel", "ClientGone"]


@pytest.mark.parametrize("again", [[CANCEL], KeyError("again")])
async def test_a_bug_fails_the_choice_once_as_internal_and_its_nodes_are_freed(again: Any) -> None:
    world = World({ev.Started: KeyError("a bug"), ev.ClientGone: again})
    world.choice.feed(ev.Started())
    world.choice.feed(Ticked())
    freed = ["cancel"] if isinstance(again, list) else []
    assert world.trace == ["Started", "ClientGone", *freed, "Ticked"]
    assert [e.code for e in world.errors] == ["internal"]


async def test_a_timer_feeds_ticked_and_close_stops_it() -> None:
    world = World({ev.Started: [ev.SetTimer(0.0)], Ticked: [ev.SetTimer(float("1e12"))]})
    world.choice.feed(ev.Started())
    assert world.trace == ["Started"]
    await asyncio.sleep(0.01)
    assert world.trace == ["Started", "Ticked"]
    await world.choice.close()
    await world.choice.close()


async def test_a_bug_in_a_question_fails_the_choice_and_its_recording_replays(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "log")
    worlds = [World({}, RequestMachine(SPEC, ev.LifecycleConfig()), recorder) for _ in range(2)]
    for world in worlds:
        world.choice.feed(ev.Started())
    await asyncio.sleep(0.01)
    assert (tmp_path / "log").stat().st_size == 0  # written at close, in one piece
    for world in worlds:
        assert [e.code for e in world.errors] == ["internal"]
        assert world.choice.machine.phase == "ended"
        await world.choice.close()
        world.choice.feed(Ticked())
        await world.choice.close()
    recorder.close()
    result = replay(tmp_path / "log", check=False)
    assert (result.machine, result.events, result.restarts) == ("RequestMachine", 4, 1)
    assert result.difference is None
