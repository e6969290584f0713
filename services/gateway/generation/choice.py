"""One choice being generated: its machine, the commands it gives, and its tokens on their way to text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from services.gateway.api.answer import Update
from services.gateway.generation.answer_text import AnswerText
from services.gateway.generation.node_client import NodeClient
from shared.core.machine import Event, Ticked
from shared.core.request import events as ev
from shared.core.request.machine import RequestMachine
from shared.io.driver import Driver, Outcome
from shared.io.recorder import Recorder
from shared.protocol.errors import Internal, TsukimiError

log = structlog.get_logger(__name__)

CancelAttempt = Callable[[ev.Cancel], None]


class Choice:
    """The shell of one RequestMachine. Tells `told` what is new, in order, the last with a finish; or `failed`, once.

    An event fed from within a command waits until the earlier commands are carried out (io.driver). A bug of the
    machine or of a command fails this choice alone, as Internal, and frees its nodes.
    """

    def __init__(
        self,
        index: int,
        machine: RequestMachine,
        text: AnswerText,
        node_client: NodeClient,
        *,
        cancel: CancelAttempt,
        told: Callable[[Update], None],
        failed: Callable[[TsukimiError], None],
        wants_ids: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.index = index
        self.machine = machine
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._text = text
        self._node_client = node_client
        self._cancel = cancel
        self._told = told
        self._failed = failed
        self._wants_ids = wants_ids
        self._ended = False
        self._broken = False
        self._tasks = _Tasks()
        self._story = _Story(recorder) if recorder is not None else None
        self._driver: Driver[Event] = Driver(
            machine,
            self._carry_out,
            tasks=self._tasks,
            recorder=self._story,
            setup=ev.ChoiceSetup(machine.spec, machine.config),
            on_bug=self._on_bug,
        )

    def feed(self, event: Event) -> None:
        """Handle the event now, or after the events before it. Once ClientGone is fed, nothing more is told."""
        if isinstance(event, ev.ClientGone):
            self._ended = True
        self._driver.feed(event)

    async def close(self) -> None:
        """Stop waiting for anything. Idempotent."""
        self._ended = True
        await self._tasks.cancel()
        if self._story is not None:
            self._story.write()

    def _on_bug(self, bug: Exception) -> None:
        names = {"request": self.machine.spec.request, "choice": self.index}
        log.error("choice_failed", **names, exc_info=bug)
        if not self._broken:
            self._broken = True
            self._end(Internal("the gateway failed to generate"))
            self.feed(ev.ClientGone("the gateway failed"))

    # -- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: Any) -> Outcome:
        match command:
            case ev.Deliver():
                return self._deliver(command)
            case ev.SetTimer():
                return _ring(command.at)
            case ev.AskPlace():
                return self._node_client.place(command)
            case ev.Reserve():
                return self._node_client.reserve(command)
            case ev.SubmitPrefill():
                return self._node_client.submit(command)
            case ev.AskSync():
                return self._node_client.sync(command)
            case ev.Cancel():
                self._cancel(command)
            case ev.Finish():
                self._finish(command)
            case ev.Fail():
                self._end(command.error.to_exception())
        return None

    # -- the answer --------------------------------------------------------------------------------------------------

    def _deliver(self, command: ev.Deliver) -> ev.StopMet | None:
        if command.cached_tokens is not None:
            self.cached_tokens = command.cached_tokens
        if self._ended:
            return None
        logprobs = command.logprobs or (None,) * len(command.tokens)
        update = Update(self.index)
        for token, logprob in zip(command.tokens, logprobs, strict=True):
            self.completion_tokens += 1
            if self._wants_ids:
                update.ids.append(token)
            self._text.push(token, logprob, update)
            if self._text.stopped:
                update.finish = "stop"
                break
        if update.text or update.entries or update.ids or update.finish:
            self._told(update)
        if not self._text.stopped:
            return None
        self._ended = True
        return ev.StopMet(self.completion_tokens)

    def _finish(self, command: ev.Finish) -> None:
        if self._ended:
            return
        self._ended = True
        update = Update(self.index, finish=command.reason)
        self._text.finish(update)
        self._told(update)

    def _end(self, error: TsukimiError) -> None:
        if not self._ended:
            self._ended = True
            self._failed(error)


async def _ring(at: float) -> Ticked:
    """Feed Ticked at `at` or soon after."""
    while (left_s := at - time.monotonic()) > 0:  # noqa: ASYNC110  (the loop's clock is coarser than ours)
        await asyncio.sleep(left_s)
    return Ticked()


class _Tasks:
    """Tasks that can be cancelled together."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def create_task(self, coro: Coroutine[Any, Any, None], /) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def cancel(self) -> None:
        """Returns when all have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Story:
    """Keeps the records of one choice and writes them in one piece, so that concurrent choices do not mix in the file."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._records: list[tuple[float, Any, Sequence[Any]]] = []
        self._written = False

    def record(self, now: float, event: Any, commands: Sequence[Any]) -> None:
        if not self._written:
            self._records.append((now, event, commands))

    def write(self) -> None:
        """Idempotent; what is recorded later is dropped. Writes nothing for a machine that was fed nothing."""
        self._written = True
        records, self._records = self._records, []
        if len(records) > 1:  # the first record says what the machine was made from
            for record in records:
                self._recorder.record(*record)
