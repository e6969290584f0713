"""Feeds a RequestMachine by hand, event by event."""

from __future__ import annotations

from typing import Any

from shared.core.request import events as ev
from shared.core.request.machine import RequestMachine
from shared.protocol.ids import NodeRef
from shared.protocol.requests import AttemptState, Placement, Reserved, TokenDelta
from tests.support.worlds.request_world import choice_spec

P = NodeRef("p0", "P")
P2 = NodeRef("p1", "P2")
D = NodeRef("d0", "D")
D2 = NodeRef("d1", "D2")


class Story:
    """Feeds a machine by hand and keeps its commands since the last look."""

    def __init__(self, spec: ev.ChoiceSpec | None = None, **config: Any) -> None:
        self.machine = RequestMachine(spec or choice_spec(), ev.LifecycleConfig(**config))
        self.now = 0.0
        self.attempt = ""

    def feed(self, event: Any, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        for c in commands:
            if isinstance(c, ev.AskPlace):
                self.attempt = c.request.attempt
        return [c for c in commands if not isinstance(c, ev.SetTimer)]

    def start(self) -> list[Any]:
        return self.feed(ev.Started())

    def place(self, prefill: NodeRef | None = P, decode: NodeRef | None = D, **more: Any) -> list[Any]:
        return self.feed(ev.PlaceAnswered(self.attempt, Placement(self.attempt, prefill, decode, **more)))

    def reserve(self, node: NodeRef = D) -> list[Any]:
        return self.feed(ev.ReserveAnswered(self.attempt, node.node, Reserved(self.attempt, b"L" * 16, 3)))

    def submit(self, node: NodeRef = P) -> list[Any]:
        return self.feed(ev.SubmitAnswered(self.attempt, node.node))

    def run(self) -> Story:
        self.start()
        self.place()
        self.reserve()
        self.submit()
        return self

    def tokens(self, node: NodeRef, index: int, *ids: int, attempt: str = "", **more: Any) -> list[Any]:
        attempt = attempt or self.attempt
        delta = TokenDelta(attempt, index, ids, **more)
        return self.feed(ev.TokensArrived(attempt, node.node, node.incarnation, delta))

    def synced(self, node: NodeRef, state: Any, delta: TokenDelta | None = None) -> list[Any]:
        return self.feed(ev.SyncAnswered(self.attempt, node.node, AttemptState(self.attempt, state, delta)))


def kinds(commands: list[Any]) -> list[str]:
    return [type(c).__name__ for c in commands]
