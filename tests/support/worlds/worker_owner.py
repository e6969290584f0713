"""The owner of one request in the simulated world of workers: a simplified gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.core.worker import events as w
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef
from shared.protocol.requests import BlockSource, HandoffTarget, Reserved, TokenDelta
from tests.support.worlds.worker_world import Lane, World
from tests.support.worlds.workers import CACHE, LIFE, job, keys_of, reserve


class Owner:
    """A gateway's view of one request."""

    def __init__(self, world: World, name: str, prompt: list[int], wanted: int) -> None:
        self.world = world
        self.name = name
        self.prompt = prompt
        self.wanted = wanted
        self.tokens: list[int] = []
        self.early: dict[int, int] = {}
        self.attempt = ""
        self.attempts = 0
        self.done = False
        self.cancelled = False

    def place(self) -> None:
        if self.done:
            return
        world = self.world
        self.attempt = f"{self.name}/0/{self.attempts}"
        self.attempts += 1
        self.early.clear()
        text = self.prompt + self.tokens
        left = self.wanted - len(self.tokens)
        fields: dict[str, Any] = {
            "max_new_tokens": left,
            "first_index": len(self.tokens),
            "gateway_incarnation": "gateway-life-1",
        }
        run = next((i for i, key in enumerate(keys_of(text)) if key not in world.cache), len(keys_of(text)))
        sources = (BlockSource(CACHE, 0, run),) if run else ()
        local = world.rng.random() < 0.3
        if local:
            request = reserve(self.attempt, text, local=True, sources=sources, **fields)
            world.ask(world.decode, lambda ask: w.ReserveAsked(request, ask), self.answered(lambda m: None))
        elif left == 1:
            self.submit(text, None, sources, fields)
        else:
            request = reserve(self.attempt, text, **fields)

            def reserved(message: Any) -> None:
                assert isinstance(message, Reserved)
                target = HandoffTarget(NodeRef("decode-0", LIFE), message.landing)
                self.submit(text, target, sources, fields)

            world.ask(world.decode, lambda ask: w.ReserveAsked(request, ask), self.answered(reserved))

    def submit(
        self, text: list[int], target: HandoffTarget | None, sources: Any, fields: dict[str, Any]
    ) -> None:
        request = job(self.attempt, text, handoff=target, sources=sources, **fields)
        self.world.ask(
            self.world.prefill, lambda ask: w.JobSubmitted(request, ask), self.answered(lambda m: None)
        )

    def answered(self, then: Callable[[Any], None]) -> Callable[[Any], None]:
        attempt = self.attempt

        def take(message: Any) -> None:
            if self.done or attempt != self.attempt:
                return
            if isinstance(message, WireError):
                assert message.code in ("overloaded", "unavailable"), message
                self.again()
            else:
                then(message)

        return take

    def again(self) -> None:
        self.drop()
        self.world.later(Lane(), self.place)

    def drop(self) -> None:
        attempt, self.attempt = self.attempt, ""
        for node in (self.world.prefill, self.world.decode):
            self.world.later(Lane(), lambda n=node: n.feed(w.AttemptCancelled(attempt)))

    def hear(self, delta: TokenDelta) -> None:
        if self.done or delta.attempt != self.attempt:
            return
        assert len(self.tokens) + self.wanted >= delta.index
        for index, token in enumerate(delta.tokens, delta.index):
            self.early[index] = token
        while len(self.tokens) in self.early:
            self.tokens.append(self.early.pop(len(self.tokens)))
        if len(self.tokens) == self.wanted:
            self.done = True
            self.drop()
        elif delta.finish in ("moved", "failed"):
            assert delta.finish == "moved" or delta.error == "engine trouble", delta
            self.again()

    def look_after(self) -> None:
        """After a silence, ask both nodes for the attempt's state, as a gateway does."""
        attempt = self.attempt
        if self.done or not attempt:
            return
        states: list[Any] = []

        def answered(message: Any) -> None:
            states.append(message)
            if message.delta is not None:
                self.hear(message.delta)
            gone = all(s.state in ("unknown", "finished") for s in states)
            if len(states) == 2 and gone and self.attempt == attempt:
                self.again()

        for node in (self.world.prefill, self.world.decode):
            self.world.ask(node, lambda ask: w.SyncAsked(attempt, len(self.tokens), ask), answered)

    def cancel(self) -> None:
        if not self.done:
            self.done = self.cancelled = True
            self.drop()
