"""One choice being generated: its machine, the commands it gives, and its tokens on their way to text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from services.gateway.api.answer import Update
from services.gateway.generation.answer_text import AnswerText
from services.gateway.generation.node_client import Calls
from shared.core.machine import Event, MachineMade, Ticked
from shared.core.request import events as ev
from shared.core.request.machine import RequestMachine
from shared.io.recorder import Recorder
from shared.protocol.errors import Internal, TsukimiError

log = structlog.get_logger(__name__)

CancelAttempt = Callable[[ev.Cancel], None]


class Choice:
    """The shell of one RequestMachine. Tells `told` what is new, in order, the last with a finish; or `failed`, once.

    What its machine or a command raises fails this choice alone, as Internal.
    """

    def __init__(
        self,
        index: int,
        machine: RequestMachine,
        text: AnswerText,
        calls: Calls,
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
        self._calls = calls
        self._cancel = cancel
        self._told = told
        self._failed = failed
        self._wants_ids = wants_ids
        self._recorder = recorder
        self._story: list[tuple[float, Event, list[Any]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._ended = False

    def feed(self, event: Event) -> None:
        if isinstance(event, ev.ClientGone):
            self._ended = True
        try:
            now = time.monotonic()
            commands = self.machine.handle(event, now)
            if self._recorder is not None:
                self._story.append((now, event, commands))
            for command in commands:
                self._carry_out(command)
        except Exception:
            log.exception("request_machine_failed", request=self.machine.spec.request, choice=self.index)
            self._end(Internal("the request's machine failed"))

    async def close(self) -> None:
        """Stop waiting for anything. Idempotent."""
        self._ended = True
        for timer in self._timers:
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._record()

    def _record(self) -> None:
        """The whole story in one piece, so that those of choices that ran at once are not mixed."""
        story, self._story = self._story, []
        if self._recorder is None or not story:
            return
        setup = ev.ChoiceSetup(self.machine.spec, self.machine.config)
        made = MachineMade(type(self.machine).__name__, msgspec.msgpack.encode(setup))
        for record in [(story[0][0], made, []), *story]:
            self._recorder.record(*record)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _carry_out(self, command: Any) -> None:
        match command:
            case ev.Deliver():
                self._deliver(command)
            case ev.SetTimer():
                self._set_timer(command.at)
            case ev.AskPlace():
                self._ask(self._calls.place(command))
            case ev.Reserve():
                self._ask(self._calls.reserve(command))
            case ev.SubmitPrefill():
                self._ask(self._calls.submit(command))
            case ev.AskSync():
                self._ask(self._calls.sync(command))
            case ev.Cancel():
                self._cancel(command)
            case ev.Finish():
                self._finish(command)
            case ev.Fail():
                self._end(command.error.to_exception())

    def _ask(self, question: Coroutine[Any, Any, Event]) -> None:
        task = asyncio.get_running_loop().create_task(self._await(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, question: Coroutine[Any, Any, Event]) -> None:
        try:
            event = await question
        except Exception:
            log.exception("request_command_failed", request=self.machine.spec.request, choice=self.index)
            self._end(Internal("a question to a node failed"))
            self.feed(ev.ClientGone("the gateway failed"))
        else:
            self.feed(event)

    def _set_timer(self, at: float) -> None:
        delay_s = at - time.monotonic()

        def ring() -> None:
            self._timers.discard(timer)
            if time.monotonic() < at:  # the loop's clock is coarser than ours
                self._set_timer(at)
            else:
                self.feed(Ticked())

        timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), ring)
        self._timers.add(timer)

    # -- the answer --------------------------------------------------------------------------------------------------

    def _deliver(self, command: ev.Deliver) -> None:
        if command.cached_tokens is not None:
            self.cached_tokens = command.cached_tokens
        if self._ended:
            return
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
        if self._text.stopped:
            self._ended = True
            self.feed(ev.StopMet(self.completion_tokens))

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
