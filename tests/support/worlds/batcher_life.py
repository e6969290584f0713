"""One life of a prefill or decode machine under random load, from its start to the end of its drain.

Everything random comes from one seed: what gateways do (`batcher_gateways`), how transfers go (`batcher_plane`), what
the engine answers and when, and the machine's configuration.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from shared.core.kv.block_events import PublishBlocks, PublishSnapshot
from shared.core.machine import Ticked
from shared.core.worker import events as w
from shared.core.worker.steps import InterruptRun, RunStep, SequenceResult, StepDone, StepFailed
from shared.core.worker.transfers import (
    BlocksFetched,
    CommitHandoff,
    FetchBlocks,
    HandoffEnded,
    LandingArrived,
)
from tests.support.worlds.batcher_accounts import Accounts
from tests.support.worlds.batcher_gateways import HEARTBEAT_S, Gateways
from tests.support.worlds.batcher_plane import Pages, Plane
from tests.support.worlds.workers import BLOCK, EOS, decode_bench, prefill_bench

TICK_S = 0.1
LEASE_S = 1.0
STEP_S = 0.01
POISONED = "poisoned"
TALLIED = (
    "preempted", "orphaned", "handoffs_failed", "landings_failed", "fetches_failed", "late_ignored",
    "cached_tokens", "fetched_tokens", "blocks_pooled",
)  # fmt: skip
"""The machine's counters."""


class Life:
    """Runs `steps` engine steps, then a drain. Any method raises AssertionError with the broken law."""

    def __init__(
        self, rng: random.Random, role: str, steps: int, accounts: Accounts, outcomes: Counter[str]
    ) -> None:
        self.rng, self.role, self.steps, self.accounts, self.outcomes = rng, role, steps, accounts, outcomes
        self.machine: Any = machine_of(role, rng)
        total = self.machine.pool.total
        self.now = 100.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self.working = 0
        """Number of steps and transfers under way. While it is positive, something is still going to happen."""
        self.pages = Pages(total)
        self.plane = Plane(rng, rng.choice((0.0, 0.05, 0.2)), self.pages, self.later, self.tell)
        self.gateways = Gateways(self)
        self.engine_trouble = rng.choice((0.0, 0.01, 0.05))
        self.step: RunStep | None = None
        self.interrupted = False
        self.draining = False
        self.drained = False
        self._fed = self._asked = 0
        self._poison: dict[str, int] = {}
        """Poisonous sequence -> how many steps with it have failed. No step that contains one succeeds."""

    # -- time ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        first = self.accounts.steps
        for at, work in (
            (0.0, self.gateways.arrive),
            (TICK_S, self.tick),
            (HEARTBEAT_S, self.gateways.heartbeat),
            (0.5, self.gateways.upset),
        ):
            self.at(at, work)
        while self.accounts.steps - first < self.steps:
            self.next()
        self.drain()
        self.check_end()

    def next(self) -> None:
        at, _, work = heappop(self._heap)
        self.now = max(self.now, at)
        work()

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        self._scheduled += 1
        heappush(self._heap, (self.now + delay_s, self._scheduled, work))

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do `work` after `delay_s` seconds; until then it counts as under way."""
        self.working += 1

        def done() -> None:
            self.working -= 1
            work()

        self.at(delay_s, done)

    def ask(self) -> int:
        self._asked += 1
        return self._asked

    # -- the machine ---------------------------------------------------------------------------------------------------

    def feed(self, event: Any, again: bool = False) -> list[Any]:
        """Feed an event; returns the replies. `again`: a repeat of an earlier event, which must change nothing."""
        if isinstance(event, LandingArrived) and not again and event.attempt in self.machine.attempts():
            self.gateways.landed(event)
        if isinstance(event, HandoffEnded) and event.ok and not again:
            self.gateways.handed_over(event.attempt)
        commands: list[Any] = self.machine.handle(event, self.now)
        self._fed += 1
        if self._fed % 5 == 0:
            self.machine.check()
        live = self.machine.attempts()
        replies = [c for c in commands if isinstance(c, w.Reply)]
        if isinstance(event, w.JobSubmitted | w.ReserveAsked):
            self.gateways.answered(event, replies)
        elif isinstance(event, LandingArrived | BlocksFetched) and not again and event.attempt in live:
            self.accounts.got_ready(event.attempt, live)
        for command in commands:
            self.execute(command, live)
        self.check_going(live)
        return replies

    def tell(self, event: Any) -> None:
        """Feed an event, sometimes twice. The repeat comes late and must have no effect."""
        self.feed(event)
        if self.rng.random() < 0.2:
            self.at(self.rng.expovariate(30.0), lambda: self.repeat(event))

    def repeat(self, event: Any) -> None:
        self.feed(event, again=True)

    def execute(self, command: Any, live: tuple[str, ...]) -> None:
        match command:
            case w.SendTokens(gateway, deltas):
                assert deltas, "an empty message"
                for delta in deltas:
                    assert delta.error != POISONED or delta.attempt in self._poison, "its neighbour did it"
                    self.gateways.hear(gateway, delta)
            case RunStep():
                assert self.step is None, "two steps are out"
                assert command.sequences, "an empty step"
                self.step, self.interrupted = command, False
                self.pages.step(command)
                self.accounts.launched(command, live)
                self.later(self.rng.expovariate(1 / STEP_S), self.end_step)
            case InterruptRun(step):
                assert self.step is not None
                assert self.step.step == step
                self.interrupted = True
            case FetchBlocks(attempt):
                self.accounts.not_ready(attempt)
                self.plane.execute(command)
            case CommitHandoff(attempt):
                self.accounts.computed(attempt)
                self.plane.execute(command)
            case w.Drained():
                assert not self.drained, "drained twice"
                self.drained = True
            case PublishBlocks() | PublishSnapshot() | w.Reply():
                pass
            case _:
                self.plane.execute(command)

    def check_going(self, live: tuple[str, ...]) -> None:
        """No livelock: while an attempt is live, something is under way or a lease is running."""
        if live and not self.working:
            waiting = self.plane.lost_landings & set(live)
            assert waiting, f"nothing will ever happen for {live}"

    # -- the engine ----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        self.pages.step_over(step)
        error = self.trouble_with(step)
        if error:
            self.accounts.step_failed()
            self.outcomes["steps failed"] += 1
            self.tell(StepFailed(step.step, error))
            return
        repeats = 1 if self.interrupted else self.rng.randint(1, step.up_to)
        results = [r for s in step.sequences if (r := self.result(s.attempt, repeats if s.sample else 0))]
        event = StepDone(step.step, tuple(results), repeats, STEP_S * repeats)
        self.accounts.ran(step)
        self.tell(event)

    def trouble_with(self, step: RunStep) -> str:
        """Why the whole step fails, or "". A poisonous sequence fails every step it is in. That is at most two
        steps: one with others, then one alone."""
        for s in step.sequences:
            if s.attempt not in self._poison and self.rng.random() < self.engine_trouble / 10:
                self._poison[s.attempt] = 0
        poisonous = [s.attempt for s in step.sequences if s.attempt in self._poison]
        for attempt in poisonous:
            self._poison[attempt] += 1
            assert self._poison[attempt] <= 2, f"{attempt} fails one step after another"
        if poisonous:
            return POISONED
        return "engine trouble" if self.rng.random() < self.engine_trouble else ""

    def result(self, attempt: str, tokens: int) -> SequenceResult | None:
        chance = self.rng.random()
        if chance < self.engine_trouble / 8:
            return None  # the engine forgot it
        if chance < self.engine_trouble / 2:
            return SequenceResult(attempt, error="not a number")
        drawn = [EOS if self.rng.random() < 0.03 else self.rng.randrange(90) for _ in range(tokens)]
        return SequenceResult(attempt, tuple(drawn))

    # -- what recurs ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.at(TICK_S, self.tick)
        self.feed(Ticked())
        self.probe()

    def probe(self) -> None:
        """Sync some attempts. The jobs of a prefill node begin in order of arrival."""
        live = self.machine.attempts()
        asked = live if self.role == "prefill" else live[:1] if self.rng.random() < 0.1 else ()
        states = []
        for attempt in asked:
            ask = self.ask()
            (reply,) = self.feed(w.SyncAsked(attempt, 0, ask))
            assert reply.ask == ask
            states.append(reply.message.state)
        assert set(states) <= {"running", "waiting"}, states
        if self.role == "prefill":
            assert states == sorted(states), f"a job overtook another: {states}"

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        self.draining = True
        grace_s = self.rng.choice((0.0, 0.5, 3.0))
        self.feed(w.DrainStarted(grace_s))
        deadline = self.now + grace_s + 2 * TICK_S
        while not self.drained:
            self.next()
            assert not self.machine.attempts() or self.now <= deadline, "somebody is live after the grace"
            assert self.now <= deadline + 30.0, "pages are still held"
        while self.working:  # nothing may become live again
            self.next()
        self.feed(Ticked())

    def check_end(self) -> None:
        self.machine.check()
        assert self.machine.attempts() == ()
        assert self.machine.pool.held == 0
        assert self.machine.load(self.now).queue_s == 0.0
        assert self.plane.idle()
        for name in TALLIED:
            self.outcomes[name] += int(self.machine.counters[name])
        self.accounts.close()
        self.gateways.close()


def machine_of(role: str, rng: random.Random) -> Any:
    fields: dict[str, Any] = {
        "pages": rng.randint(4, 36),
        "chunk_tokens": rng.choice((BLOCK, 8, 16, 64)),
        "max_running": rng.randint(1, 8),
        "max_waiting": rng.randint(1, 12),
        "gateway_lease_s": LEASE_S,
        "remember_s": 5.0,
        "remember_attempts": 400,
        "keep_blocks": rng.random() < 0.8,
        "stream_tokens": rng.random() < 0.8,
    }
    if role == "prefill":
        return prefill_bench(**fields).machine
    fields |= {
        "headroom_tokens": rng.choice((0, 1, 3, 12)), "reservation_lease_s": 0.6,
        "max_repeat": rng.choice((1, 1, 4)),
    }  # fmt: skip
    return decode_bench(**fields).machine
