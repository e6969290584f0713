"""One life of a prefill or decode machine under random load, from its start to the end of its drain.

Everything random comes from one seed: arrivals, lengths, shared prefixes, cancels, redeliveries, gateways that die or
restart, engine failures, transfers that fail, stop or never come. A request's gateway places it anew when it is moved
or refused for now, a few times.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from msgspec import Struct, field

from shared.core import worker as w
from shared.core.blocks import TOKEN_BYTES, blocks_for
from shared.core.steps import InterruptRun, RunStep, SequenceResult, StepDone, StepFailed
from shared.core.transfers import BlocksFetched, CommitHandoff, FetchBlocks, HandoffEnded, LandingArrived
from shared.protocol.errors import WireError
from shared.protocol.requests import BlockSource, PrefillJob, ReserveRequest, TokenDelta
from shared.protocol.sampling import SamplingParams
from tests.support.batcher_accounts import Account, Accounts
from tests.support.batcher_plane import Pages, Plane
from tests.support.workers import BLOCK, EOS, TARGET, decode_bench, job, prefill_bench, reserve, source

TICK_S = 0.1
HEARTBEAT_S = 0.3
LEASE_S = 1.0
STEP_S = 0.01
MOST_TRIES = 6
REFUSED_FOR_NOW = ("overloaded", "unavailable")
REFUSED_FOR_GOOD = ("too_large", "cancelled")


class Gateway(Struct, eq=False):
    name: str
    lives: int = 1
    alive: bool = True

    @property
    def life(self) -> str:
        return f"{self.name}/{self.lives}"


class Request(Struct, eq=False):
    name: str
    gateway: Gateway
    gateway_life: str
    text: list[int]
    """Prompt and answer so far."""
    left: int
    sampling: SamplingParams
    tries: int = 0
    answered: int = 0
    attempt: str = ""
    message: PrefillJob | ReserveRequest | None = None
    ended: str = ""

    def hear(self, tokens: tuple[int, ...]) -> None:
        self.text = self.text + list(tokens)
        self.answered += len(tokens)
        self.left -= len(tokens)


class Life(Struct, eq=False):
    """`steps` engine steps, then a drain. `run` raises AssertionError, naming the law, if one does not hold."""

    rng: random.Random
    role: str
    steps: int
    accounts: Accounts
    outcomes: Counter[str]
    """How requests ended, and what happened on the way."""
    now: float = 100.0
    asks: int = 0
    heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    scheduled: int = 0
    working: int = 0
    """Steps and transfers under way: as long as there are any, something is going to happen."""
    requests: list[Request] = field(default_factory=list)
    open_requests: dict[str, Request] = field(default_factory=dict)
    """By attempt."""
    step: RunStep | None = None
    interrupted: bool = False
    drained: bool = False
    draining: bool = False
    fed: int = 0
    machine: Any = None
    pages: Any = None
    plane: Any = None
    gateways: list[Gateway] = field(default_factory=list)
    heads: list[list[int]] = field(default_factory=list)
    arrival_s: float = 0.0
    engine_trouble: float = 0.0

    def __post_init__(self) -> None:
        rng = self.rng
        pages = rng.randint(4, 36)
        fields: dict[str, Any] = {
            "pages": pages,
            "chunk_tokens": rng.choice((BLOCK, 8, 16, 64)),
            "max_running": rng.randint(1, 8),
            "max_waiting": rng.randint(1, 12),
            "gateway_lease_s": LEASE_S,
            "remember_s": 5.0,
            "remember_attempts": 400,
            "keep_blocks": rng.random() < 0.8,
            "stream_tokens": rng.random() < 0.8,
        }
        if self.role == "decode":
            fields |= {
                "headroom_tokens": rng.choice((0, 1, 3, 12)), "reservation_lease_s": 0.6,
                "max_repeat": rng.choice((1, 1, 4)), "tbt_limit_s": rng.choice((0.0, 0.0, 1e-4)),
            }  # fmt: skip
        bench = prefill_bench(**fields) if self.role == "prefill" else decode_bench(**fields)
        self.machine = bench.machine
        self.pages = Pages(pages)
        trouble = rng.choice((0.0, 0.02, 0.1))
        self.plane = Plane(rng, trouble, self.pages, self.later, self.tell)
        self.engine_trouble = rng.choice((0.0, 0.01, 0.05))
        self.gateways = [Gateway(f"gateway-{i}") for i in range(3)]
        self.heads = [[rng.randrange(90) for _ in range(pages * BLOCK)] for _ in range(3)]
        self.arrival_s = rng.choice((0.02, 0.06, 0.3))

    # -- time ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        first = self.accounts.steps
        for at, work in (
            (0.0, self.arrive),
            (TICK_S, self.tick),
            (HEARTBEAT_S, self.heartbeat),
            (0.5, self.upset),
        ):
            self.at(at, work)
        while self.accounts.steps - first < self.steps:
            self.next()
        self.drain()
        self.check_end()

    def next(self) -> None:
        at, _, work = heappop(self.heap)
        self.now = max(self.now, at)
        work()

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        self.scheduled += 1
        heappush(self.heap, (self.now + delay_s, self.scheduled, work))

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Work under way."""
        self.working += 1

        def done() -> None:
            self.working -= 1
            work()

        self.at(delay_s, done)

    # -- the machine ---------------------------------------------------------------------------------------------------

    def feed(self, event: Any) -> list[Any]:
        """Returns the replies."""
        if isinstance(event, LandingArrived) and event.attempt in self.machine.attempts():
            self.landed(event)
        if isinstance(event, HandoffEnded) and event.ok:
            self.handed_over(event.attempt)
        commands: list[Any] = self.machine.handle(event, self.now)
        self.fed += 1
        if self.fed % 5 == 0:
            self.machine.check()
        live = self.machine.attempts()
        replies = [c for c in commands if isinstance(c, w.Reply)]
        if isinstance(event, w.JobSubmitted | w.ReserveAsked):
            self.answered(event, replies)
        elif isinstance(event, LandingArrived | BlocksFetched) and event.attempt in live:
            self.accounts.got_ready(event.attempt, live)
        for command in commands:
            self.execute(command, live)
        self.check_going(live)
        return replies

    def tell(self, event: Any) -> None:
        self.feed(event)

    def execute(self, command: Any, live: tuple[str, ...]) -> None:
        match command:
            case w.SendTokens(gateway, deltas):
                assert deltas, "an empty message"
                for delta in deltas:
                    self.hear(gateway, delta)
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
            case w.PublishBlocks() | w.PublishSnapshot() | w.Reply():
                pass
            case _:
                self.plane.execute(command)

    def check_going(self, live: tuple[str, ...]) -> None:
        """No livelock: as long as somebody is live something is under way, or a lease runs."""
        if live and not self.working:
            waiting = self.plane.lost_landings & set(live)
            assert waiting, f"nothing will ever happen for {live}"

    # -- the engine ----------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        self.pages.step_over(step)
        if self.rng.random() < self.engine_trouble:
            self.accounts.step_failed()
            self.outcomes["steps failed"] += 1
            self.feed(StepFailed(step.step, "engine trouble"))
            return
        repeats = 1 if self.interrupted else self.rng.randint(1, step.up_to)
        results = [r for s in step.sequences if (r := self.result(s.attempt, repeats if s.sample else 0))]
        event = StepDone(step.step, tuple(results), repeats, STEP_S * repeats)
        self.accounts.ran(step)
        self.feed(event)
        self.over_again(event)

    def result(self, attempt: str, tokens: int) -> SequenceResult | None:
        chance = self.rng.random()
        if chance < self.engine_trouble / 8:
            return None  # the engine forgot it
        if chance < self.engine_trouble / 2:
            return SequenceResult(attempt, error="not a number")
        drawn = [EOS if self.rng.random() < 0.03 else self.rng.randrange(90) for _ in range(tokens)]
        return SequenceResult(attempt, tuple(drawn))

    def over_again(self, event: Any) -> None:
        """Now and then something is told twice: late, and to no effect on anybody's ending."""
        if self.rng.random() < 0.02:
            self.at(self.rng.random(), lambda: self.tell(event))

    # -- gateways ------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if self.draining:
            return
        rng = self.rng
        self.at(rng.expovariate(1 / self.arrival_s), self.arrive)
        gateway = rng.choice(self.gateways)
        if not gateway.alive:
            return
        most = self.machine.pool.total * BLOCK
        length = rng.randint(1, most + 8) if rng.random() < 0.1 else rng.randint(1, max(2, most // 3))
        shared = rng.randrange(length) if rng.random() < 0.6 else 0
        text = rng.choice(self.heads)[:shared]
        text = text + [rng.randrange(90) for _ in range(length - len(text))]
        sampling = SamplingParams(eos_token_ids=(EOS,), ignore_eos=rng.random() < 0.5)
        wanted = rng.choice((1, 2, rng.randint(1, 30), rng.randint(20, 90)))
        request = Request(f"r{len(self.requests)}", gateway, gateway.life, text, wanted, sampling)
        self.requests.append(request)
        self.place(request)
        if rng.random() < 0.15:
            self.at(rng.expovariate(3.0), lambda: self.cancel(request))

    def place(self, request: Request) -> None:
        if request.ended:
            return
        if request.tries == MOST_TRIES:
            self.end(request, "gave up")
            return
        request.tries += 1
        request.attempt = f"{request.name}/0/{request.tries}"
        if self.rng.random() < 0.01:
            self.feed(w.AttemptCancelled(request.attempt))  # it overtakes its job
        request.message = self.message(request)
        self.open_requests[request.attempt] = request
        self.submit(request)

    def message(self, request: Request) -> PrefillJob | ReserveRequest:
        rng = self.rng
        full = len(request.text) // BLOCK
        sources: tuple[BlockSource, ...] = ()
        if full and rng.random() < 0.5:
            cut = rng.randint(1, full)
            sources = (source(0, cut), source(rng.randint(0, cut), full))
        fields: dict[str, Any] = {
            "gateway": request.gateway.name, "gateway_incarnation": request.gateway_life,
            "max_new_tokens": request.left, "first_index": request.answered, "sampling": request.sampling,
            "budget_s": rng.choice((0.0, 0.3, 2.0)),
        }  # fmt: skip
        if rng.random() < 0.3:
            fields["pool"] = None
        if self.role == "prefill":
            target = TARGET if rng.random() < 0.8 else None
            return job(request.attempt, request.text, handoff=target, sources=sources, **fields)
        local = rng.random() < 0.4
        return reserve(request.attempt, request.text, local=local, sources=sources, **fields)

    def submit(self, request: Request) -> None:
        self.asks += 1
        message = request.message
        assert message is not None
        asked = w.JobSubmitted if isinstance(message, PrefillJob) else w.ReserveAsked
        self.feed(asked(message, self.asks))  # type: ignore[arg-type]
        if self.rng.random() < 0.05:  # redelivered
            self.at(self.rng.expovariate(5.0), lambda: self.redeliver(message))

    def redeliver(self, message: PrefillJob | ReserveRequest) -> None:
        self.asks += 1
        asked = w.JobSubmitted if isinstance(message, PrefillJob) else w.ReserveAsked
        over = message.attempt in self.accounts.all and message.attempt not in self.machine.attempts()
        self.feed(asked(message, self.asks))  # type: ignore[arg-type]
        assert not (over and message.attempt in self.machine.attempts()), "it came back to life"

    def answered(self, event: w.JobSubmitted | w.ReserveAsked, replies: list[w.Reply]) -> None:
        assert [r.ask for r in replies] == [event.ask], f"{event} was answered {len(replies)} times"
        answer = replies[0].message
        message = event.job if isinstance(event, w.JobSubmitted) else event.request
        request = self.open_requests.get(message.attempt)
        if message.attempt in self.accounts.all:
            return
        if isinstance(answer, WireError):
            if request is not None:
                self.refused(request, answer)
            return
        self.accounts.accepted(account(message))  # maybe one that was refused before, and then redelivered
        self.outcomes["accepted"] += 1
        if isinstance(message, PrefillJob) or message.local is not None:
            self.accounts.got_ready(message.attempt, self.machine.attempts())

    def refused(self, request: Request, error: WireError) -> None:
        del self.open_requests[request.attempt]
        self.outcomes[f"refused: {error.code}"] += 1
        assert error.code in REFUSED_FOR_NOW + REFUSED_FOR_GOOD, error
        if error.code in REFUSED_FOR_GOOD or self.draining:
            self.end(request, error.code)
        else:
            self.at(self.rng.expovariate(5.0), lambda: self.place(request))

    def landed(self, event: LandingArrived) -> None:
        """The gateway has the first token from the node that prefilled."""
        self.accounts.landed(event.attempt)
        request = self.open_requests.get(event.attempt)
        if request is not None:
            request.hear((event.first_token,))

    def handed_over(self, attempt: str) -> None:
        self.accounts.all[attempt].handed_over = True
        request = self.open_requests.pop(attempt, None)
        if request is not None:
            self.end(request, "handed over")

    def hear(self, gateway: str, delta: TokenDelta) -> None:
        self.accounts.told(delta)
        if delta.finish is not None:
            self.outcomes[f"said: {delta.finish}"] += 1
        request = self.open_requests.get(delta.attempt)
        if request is None:
            return
        assert gateway == request.gateway.name
        request.hear(delta.tokens[request.answered - delta.index :])
        if delta.finish is None:
            return
        del self.open_requests[delta.attempt]
        if delta.finish == "moved" and not self.draining and request.left > 0:
            self.at(self.rng.expovariate(20.0), lambda: self.place(request))
        else:
            self.end(request, delta.finish)

    def cancel(self, request: Request) -> None:
        if request.ended:
            return
        self.end(request, "cancelled")
        attempt = request.attempt
        self.open_requests.pop(attempt, None)
        self.accounts.owner_left(attempt)
        event = w.AttemptCancelled(attempt)
        self.feed(event)
        assert attempt not in self.machine.attempts()
        self.over_again(event)

    def end(self, request: Request, why: str) -> None:
        assert not request.ended
        request.ended = why
        self.outcomes[f"request: {why}"] += 1

    # -- what recurs ---------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.at(TICK_S, self.tick)
        self.feed(w.Ticked())
        self.probe()

    def heartbeat(self) -> None:
        self.at(HEARTBEAT_S, self.heartbeat)
        for gateway in self.gateways:
            if gateway.alive:
                self.feed(w.GatewaySeen(gateway.name, gateway.life))

    def upset(self) -> None:
        """A gateway dies, and comes back after its lease or at once; or the bus is gone for a while."""
        self.at(self.rng.expovariate(0.3), self.upset)
        gateway = self.rng.choice(self.gateways)
        chance = self.rng.random()
        if chance < 0.2:
            self.feed(w.BusLost())
            self.at(1.5, lambda: self.tell(w.BusFound()))
        elif gateway.alive:
            gateway.alive = False
            for request in list(self.requests):
                if request.gateway is gateway and not request.ended:
                    self.end(request, "owner lost")
                    self.open_requests.pop(request.attempt, None)
            self.accounts.life_over(gateway.life)
            self.at(self.rng.choice((0.01, 3.0)), lambda: self.come_back(gateway))

    def come_back(self, gateway: Gateway) -> None:
        old = gateway.life
        gateway.lives += 1
        gateway.alive = True
        self.feed(w.GatewaySeen(gateway.name, gateway.life))
        for attempt in self.machine.attempts():
            assert self.accounts.all[attempt].owner != old, f"{attempt} outlives its owner"

    def probe(self) -> None:
        """Ask after somebody. The jobs of a prefill node begin in the order they came."""
        live = self.machine.attempts()
        asked = live if self.role == "prefill" else live[:1] if self.rng.random() < 0.1 else ()
        states = []
        for attempt in asked:
            self.asks += 1
            (reply,) = self.feed(w.SyncAsked(attempt, 0, self.asks))
            assert reply.ask == self.asks
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
        while self.working:  # nothing of it may come to life again
            self.next()
        self.feed(w.Ticked())

    def check_end(self) -> None:
        self.machine.check()
        assert self.machine.attempts() == ()
        assert self.machine.pool.held == 0
        assert self.machine.load(self.now).queue_s == 0.0
        assert self.plane.idle()
        for name in (
            "preempted",
            "orphaned",
            "handoffs_failed",
            "landings_failed",
            "fetches_failed",
            "late_ignored",
        ):
            self.outcomes[name] += int(self.machine.counters[name])
        self.accounts.close()
        assert not self.open_requests, f"forgotten: {sorted(self.open_requests)}"
        for request in self.requests:
            if not request.ended:
                self.end(request, "gave up")  # it waited to be placed again


def account(message: PrefillJob | ReserveRequest) -> Account:
    if isinstance(message, PrefillJob):
        need, tokens = blocks_for(len(message.tokens) // TOKEN_BYTES, BLOCK), 1
    else:
        tokens = message.max_new_tokens
        need = tokens - 1 + (blocks_for(message.prompt_tokens, BLOCK) if message.local else 0)
    return Account(message.attempt, message.gateway_incarnation, need, tokens, message.first_index)
