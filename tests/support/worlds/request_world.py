"""A small cluster around one RequestMachine, driven by a random source. It loses, repeats and reorders messages, kills
nodes and takes the bus down. Its tokens depend on the position only, as counter-based sampling guarantees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from shared.core.kv.block_keys import block_keys, pack_tokens, unpack_tokens
from shared.core.machine import BusFound, BusLost, Event, Ticked
from shared.core.request import events as ev
from shared.core.request.attempt import State
from shared.core.request.machine import RequestMachine
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import (
    AttemptState,
    FinishReason,
    Placement,
    PrefillJob,
    Reserved,
    ReserveRequest,
    TokenDelta,
)
from shared.protocol.sampling import SamplingParams, TokenLogprob

BLOCK = 4
NAMESPACE = b"n" * 16
EOS = 99


def choice_spec(prompt: int = 10, most: int = 8, eos: bool = True) -> ev.ChoiceSpec:
    tokens = pack_tokens(range(1, prompt + 1))
    return ev.ChoiceSpec(
        request="r",
        choice=0,
        model="toy",
        namespace=NAMESPACE,
        block_tokens=BLOCK,
        prompt_tokens=prompt,
        prompt=tokens,
        block_keys=tuple(block_keys(NAMESPACE, tokens, BLOCK)),
        max_new_tokens=most,
        sampling=SamplingParams(seed=1, top_logprobs=0, eos_token_ids=(EOS,), ignore_eos=not eos),
        gateway="gateway-0",
        gateway_incarnation="g",
    )


def answer_of(spec: ev.ChoiceSpec, eos_at: int | None) -> list[int]:
    """The only correct answer."""
    tokens = [EOS if i == eos_at else 1000 + i for i in range(spec.max_new_tokens)]
    end = eos_at + 1 if eos_at is not None and not spec.sampling.ignore_eos else spec.max_new_tokens
    return tokens[:end]


class Node:
    """One life of a node. Per attempt: the index of its first token, how many it made, and where it stops."""

    def __init__(self, ref: NodeRef) -> None:
        self.ref = ref
        self.up = True
        self.first: dict[str, int] = {}
        self.made: dict[str, int] = {}
        self.last: dict[str, int] = {}
        """An attempt runs while made < last; a reservation whose KV has not come has last == made."""


class World:
    def __init__(
        self, rng: random.Random, spec: ev.ChoiceSpec, answer: list[int], config: ev.LifecycleConfig
    ) -> None:
        self.rng, self.spec, self.answer = rng, spec, answer
        self.machine = RequestMachine(spec, config)
        self.now = 0.0
        self.nodes = {n: Node(NodeRef(n, f"{n}/0")) for n in ("p0", "p1", "d0", "d1")}
        self.lives = 0
        self.bus = True
        self.conductor = True
        self.wire: list[Callable[[], Event | None]] = []
        """Messages under way to the machine or to a node; delivered in any order. Delivery makes an event, or none."""
        self.timers: list[float] = []
        self.delivered: list[int] = []
        self.logprobs = 0
        self.ended: list[ev.Finish | ev.Fail] = []
        self.handoff: dict[str, tuple[str, int]] = {}

    # -- the machine's side --------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        for command in self.machine.handle(event, self.now):
            self.run(command)
        self.machine.check()

    def run(self, command: Any) -> None:
        match command:
            case ev.AskPlace():
                self.wire.append(lambda: self.place(command))
            case ev.Reserve():
                self.wire.append(lambda: self.reserve(command.node, command.request))
            case ev.SubmitPrefill():
                self.wire.append(lambda: self.submit(command.node, command.job))
            case ev.Cancel():
                self.wire.append(lambda: self.cancel(command))
            case ev.AskSync():
                self.wire.append(lambda: self.sync(command))
            case ev.Deliver():
                assert command.index == len(self.delivered)
                self.delivered += command.tokens
                self.logprobs += len(command.logprobs)
            case ev.Finish() | ev.Fail():
                self.ended.append(command)
            case ev.SetTimer():
                self.timers.append(command.at)

    # -- the cluster's side --------------------------------------------------------------------------------------

    def place(self, command: ev.AskPlace) -> Event:
        request = command.request
        if not (self.bus and self.conductor):
            return ev.PlaceRefused(request.attempt, WireError("unavailable"))
        assert (
            request.prompt_tokens + request.max_new_tokens
            == self.spec.prompt_tokens + self.spec.max_new_tokens
        )
        avoid = set(request.avoid)
        life = {n: (n, node.ref.incarnation) for n, node in self.nodes.items()}
        prefill = [n for n in ("p0", "p1") if life[n] not in avoid]
        decode = [n for n in ("d0", "d1") if life[n] not in avoid]
        if not prefill or not decode:
            return ev.PlaceRefused(request.attempt, WireError("unavailable", "none left"))
        p: NodeRef | None = self.nodes[self.rng.choice(prefill)].ref
        d: NodeRef | None = self.nodes[self.rng.choice(decode)].ref
        if request.max_new_tokens == 1 and self.rng.random() < 0.8:
            d = None
        elif self.rng.random() < 0.25:
            p = None
        return ev.PlaceAnswered(request.attempt, Placement(request.attempt, p, d))

    def reachable(self, ref: NodeRef) -> bool:
        node = self.nodes[ref.node]
        return self.bus and node.up and node.ref == ref

    def reserve(self, ref: NodeRef, request: ReserveRequest) -> Event:
        if not self.reachable(ref):
            return ev.ReserveRefused(request.attempt, ref.node, WireError("unavailable"))
        if self.rng.random() < 0.1:
            return ev.ReserveRefused(request.attempt, ref.node, WireError("overloaded"))
        self.check_rest(request.attempt, request.prompt_tokens, request.first_index)
        tail = request.prompt_tokens - len(request.block_keys) * BLOCK
        assert len(request.tail_tokens) == tail < BLOCK
        node = self.nodes[ref.node]
        first = request.first_index if request.local else request.first_index + 1
        node.first[request.attempt] = first
        node.made[request.attempt] = first
        node.last[request.attempt] = len(self.answer) if request.local else first
        return ev.ReserveAnswered(request.attempt, ref.node, Reserved(request.attempt, b"l" * 16, 1))

    def submit(self, ref: NodeRef, job: PrefillJob) -> Event:
        if not self.reachable(ref):
            return ev.SubmitRefused(job.attempt, ref.node, WireError("unavailable"))
        self.check_rest(job.attempt, len(unpack_tokens(job.tokens)), job.first_index)
        node = self.nodes[ref.node]
        node.first[job.attempt] = node.made[job.attempt] = job.first_index
        node.last[job.attempt] = job.first_index + 1
        if job.handoff is not None and job.first_index + 1 < len(self.answer):
            self.handoff[job.attempt] = job.handoff.decode.node, job.first_index + 1
        if self.rng.random() < 0.1:
            return ev.SubmitRefused(job.attempt, ref.node, WireError("deadline_exceeded"))
        return ev.SubmitAnswered(job.attempt, ref.node)

    def check_rest(self, attempt: str, prompt: int, first_index: int) -> None:
        if self.machine.attempt is not None and self.machine.attempt.id == attempt:
            assert prompt == self.spec.prompt_tokens + first_index

    def cancel(self, command: ev.Cancel) -> None:
        node = self.nodes[command.node]
        if self.bus and node.up:
            node.last.pop(command.attempt, None)
            node.made.pop(command.attempt, None)

    def sync(self, command: ev.AskSync) -> Event:
        node = self.nodes[command.node]
        if not (self.bus and node.up):
            return ev.SyncFailed(command.attempt, command.node, WireError("unavailable"))
        if self.rng.random() < 0.1:
            return ev.SyncFailed(command.attempt, command.node, WireError("deadline_exceeded"))
        made = node.made.get(command.attempt)
        if made is None:
            return ev.SyncAnswered(command.attempt, command.node, AttemptState(command.attempt, "unknown"))
        first = max(command.from_index, node.first[command.attempt])
        delta = self.delta(command.attempt, first, made) if first < made or made == len(self.answer) else None
        ended = made == len(self.answer) or (made == node.last[command.attempt] and command.node[0] == "p")
        waits = command.node[0] == "d" and made == node.last[command.attempt]
        state: State = "finished" if ended else "waiting" if waits else "running"
        return ev.SyncAnswered(command.attempt, command.node, AttemptState(command.attempt, state, delta))

    def delta(self, attempt: str, first: int, end: int) -> TokenDelta:
        finish: FinishReason | None = None
        if end == len(self.answer):
            finish = "stop" if self.answer[-1] == EOS else "length"
        tokens = tuple(self.answer[first:end])
        logprobs = tuple(TokenLogprob(-1.0) for _ in tokens)
        return TokenDelta(
            attempt, min(first, end), tokens, logprobs, finish, cached_tokens=4 if first == 0 else None
        )

    def step(self, node: Node) -> None:
        """One engine step: every running attempt makes one token."""
        for attempt, last in list(node.last.items()):
            made = node.made[attempt]
            if made >= last:
                continue
            node.made[attempt] = made + 1
            delta = self.delta(attempt, made, made + 1)
            event = ev.TokensArrived(attempt, node.ref.node, node.ref.incarnation, delta)
            self.wire.append(lambda e=event: e)  # type: ignore[misc]
            self.hand_over(attempt)

    def hand_over(self, attempt: str) -> None:
        to, index = self.handoff.pop(attempt, ("", 0))
        if to and self.nodes[to].up and attempt in self.nodes[to].made:
            self.nodes[to].made[attempt] = index
            self.nodes[to].last[attempt] = len(self.answer)

    def give_up(self, node: Node) -> None:
        """Give up attempts, as in a drain or a preemption."""
        for attempt in [a for a, last in node.last.items() if node.made[a] < last]:
            index = node.made.pop(attempt)
            del node.last[attempt]
            event = ev.TokensArrived(
                attempt, node.ref.node, node.ref.incarnation, TokenDelta(attempt, index, finish="moved")
            )
            self.wire.append(lambda e=event: e)  # type: ignore[misc]

    # -- chaos ---------------------------------------------------------------------------------------------------

    def deliver_one(self) -> None:
        if self.wire:
            make = self.wire.pop(self.rng.randrange(len(self.wire)))
            event = make()
            if event is not None:
                self.feed(event)

    def tokens_under_way(self) -> list[Callable[[], Event | None]]:
        return [m for m in self.wire if m.__defaults__]

    def lose_tokens(self) -> None:
        if under_way := self.tokens_under_way():
            self.wire.remove(self.rng.choice(under_way))

    def repeat_tokens(self) -> None:
        if under_way := self.tokens_under_way():
            self.wire.append(self.rng.choice(under_way))

    def kill(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        if node.up:
            node.up = False
            lost = ev.NodeLost(node.ref.node, node.ref.incarnation)
            self.wire.append(lambda: lost)

    def restart(self) -> None:
        for name, node in self.nodes.items():
            if not node.up:
                self.lives += 1
                self.nodes[name] = Node(NodeRef(name, f"{name}/{self.lives}"))
                return

    def toggle_bus(self) -> None:
        self.bus = not self.bus
        self.feed(BusFound() if self.bus else BusLost())

    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        due = [at for at in self.timers if at <= self.now]
        self.timers = [at for at in self.timers if at > self.now]
        for _ in due:
            self.feed(Ticked())

    def chaos(self) -> None:
        actions: list[Callable[[], object]] = [
            self.deliver_one,
            self.deliver_one,
            self.deliver_one,
            self.lose_tokens,
            self.repeat_tokens,
            self.kill,
            self.restart,
            self.toggle_bus,
            lambda: self.let_time_pass(self.rng.choice([0.01, 0.2, 1.5])),
            lambda: self.step(self.rng.choice(list(self.nodes.values()))),
            lambda: self.step(self.rng.choice(list(self.nodes.values()))),
            lambda: self.give_up(self.rng.choice(list(self.nodes.values()))),
            lambda: setattr(self, "conductor", not self.conductor),
        ]
        self.rng.choice(actions)()

    def calm(self) -> None:
        """Trouble ends: nodes that are up take steps, nothing is lost, and time passes."""
        self.conductor = True
        if not self.bus:
            self.toggle_bus()
        for _ in range(4):
            self.restart()
        for _ in range(20_000):
            if self.machine.phase == "ended":
                return
            if self.wire:
                self.deliver_one()
                continue
            for node in self.nodes.values():
                self.step(node)
            if not self.wire:
                self.let_time_pass(0.25)
        raise AssertionError(f"the request never ended: {self.machine.phase}, {self.delivered}")
