"""Generation over NATS, for clients of the cluster: one request in, a stream of numbered events out.

Publish a call to `subjects.GENERATE` with a reply subject. Events come to the reply subject, numbered 0, 1, 2 ...;
the last has `last` set, and carries the error if there is one. No event follows it. A client that stops listening on
the reply subject has left, and its generation ends with the next event. (Each event carries a reply subject on which
nats-server tells the gateway that nobody listens. Clients must not send anything there.) A call is GenerateCall as
msgpack, or as JSON with the same fields; events come in the encoding of the call:

    nats request tsukimi.v1.generate --replies=0 --timeout 30s \\
        '{"kind":"chat","body":{"model":"toy","messages":[{"role":"user","content":"hello"}]}}'

A body is what POST /v1/chat/completions (or /v1/completions) takes; a chunk is what its stream sends. `stream` in the
body has no effect, and usage is always included. To end a generation early, publish GenerateCancel with its id to
`subjects.GENERATE_CANCEL` (it reaches every gateway; unknown ids are ignored).
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from shared.protocol.errors import WireError
from shared.protocol.ids import RequestId


class GenerateCall(Struct, frozen=True):
    """From: any client. To: one gateway. Not idempotent: a call sent twice is generated twice."""

    kind: Literal["chat", "completion"]
    body: dict[str, Any]
    id: RequestId = ""
    """Names the generation, for GenerateCancel. At most 128 characters; if empty, the gateway makes one."""


class GenerateEvent(Struct, frozen=True, omit_defaults=True):
    """From: a gateway. To: the call's reply subject."""

    id: RequestId
    seq: int
    """0, 1, 2 ...: a gap means that the bus lost an event."""
    chunk: Any = None
    """A chat.completion.chunk or text_completion. None: a keep-alive without content."""
    last: bool = False
    error: WireError | None = None
    """Why the generation failed; only with `last`."""


class GenerateCancel(Struct, frozen=True):
    """From: any client. To: every gateway. Idempotent."""

    id: RequestId
