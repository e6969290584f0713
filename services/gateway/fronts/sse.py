"""Server-sent events as OpenAI clients read them. Bytes only."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.gateway.api.errors import error_object
from services.gateway.api.openai_response_objects import Answer
from shared.protocol.errors import TsukimiError

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment. Clients skip it, and proxies see that the stream is alive."""
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def data(chunks: Sequence[Answer]) -> bytes:
    return b"".join(b"data: %b\n\n" % _encoder.encode(chunk) for chunk in chunks)


def error(failure: TsukimiError) -> bytes:
    """The error event that a stream ends with instead of a finish_reason and [DONE]."""
    return b"data: %b\n\n" % _encoder.encode(error_object(failure))
