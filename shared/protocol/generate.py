"""Generation over NATS, for clients of the cluster: one request in, a stream of numbered events out.

Publish a call to `subjects.GENERATE` with a reply subject. Events come to the reply subject, numbered 0, 1, 2 ...;
the last has `last` set, and carries the error if there is one. Nothing comes after it. Whoever listens no more to the
reply subject has left: the generation ends with the next event. (Events carry a reply subject of the gateway's, at which
the server says so; nothing is to be sent there.) A call is msgpack of
GenerateCall, or JSON of the same fields; events come in the encoding of the call:

    nats request tsukimi.v1.generate --replies=0 --timeout 30s \\
        '{"kind":"chat","body":{"model":"toy","messages":[{"role":"user","content":"hello"}]}}'

A body is what POST /v1/chat/completions (or /v1/completions) takes; a chunk is what its stream sends. `stream` in the
body does not matter, usage is always told. To end a generation before its time publish GenerateCancel with its id to
`subjects.GENERATE_CANCEL` (every gateway hears it; unknown ids are ignored).
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from shared.protocol.errors import WireError
from shared.protocol.ids import RequestId


class GenerateCall(Struct, frozen=True):
    """From: any client. To: one gateway. Not idempotent: sent twice, it is generated twice."""

    kind: Literal["chat", "completion"]
    body: dict[str, Any]
    id: RequestId = ""
    """Names the generation, for GenerateCancel; minted if empty, at most 128 characters."""


class GenerateEvent(Struct, frozen=True, omit_defaults=True):
    """From: a gateway. To: the call's reply subject."""

    id: RequestId
    seq: int
    """0, 1, 2 ...: a gap means that the bus lost an event."""
    chunk: Any = None
    """A chat.completion.chunk or text_completion. None: a sign of life."""
    last: bool = False
    error: WireError | None = None
    """Why the generation failed; only with `last`."""


class GenerateCancel(Struct, frozen=True):
    """From: any client. To: every gateway. Idempotent."""

    id: RequestId
