"""What the event at hand leads to: commands, and tokens for gateways."""

from __future__ import annotations

from typing import Any

from shared.core.machine import Ask
from shared.core.worker import events as w
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeId
from shared.protocol.requests import Accepted, AttemptState, Reserved, TokenDelta


class Outbox:
    """Filled by the pieces of one machine while it handles an event, and emptied by the machine after it.

    Commands keep their order. Tokens go out before all commands, in one message for each gateway.
    """

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.tokens: dict[NodeId, list[TokenDelta]] = {}

    def send(self, gateway: NodeId, delta: TokenDelta) -> None:
        box = self.tokens.get(gateway)
        if box is None:
            self.tokens[gateway] = [delta]
        else:
            box.append(delta)

    def reply(self, ask: Ask, message: Accepted | Reserved | AttemptState | WireError) -> None:
        self.commands.append(w.Reply(ask, message))

    def put_tokens_first(self) -> None:
        self.commands[:0] = [w.SendTokens(gateway, tuple(deltas)) for gateway, deltas in self.tokens.items()]
        self.tokens = {}
