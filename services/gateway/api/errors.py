"""The only place where errors become what OpenAI clients expect: a status, a Retry-After, and an error object."""

from __future__ import annotations

import math
from typing import Any

from shared.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    Invalid,
    Overloaded,
    Refused,
    TooLarge,
    TsukimiError,
    Unavailable,
)

RETRY_AFTER_S = 1.0
"""Retry-After, in seconds, of errors that ask for another try without saying when."""


class UnknownModel(Invalid):
    """No node serves the model."""


class ContextExceeded(Invalid):
    """Prompt and answer don't fit the model; the message names the sizes."""


class NotFound(Invalid):
    """No such path."""


class WrongMethod(Invalid):
    """The path takes another method."""


class Said(tuple[int, str, str | None]):
    """HTTP status, OpenAI error type, and code (None: the error's own)."""


TABLE: tuple[tuple[type[TsukimiError], Said], ...] = (
    (UnknownModel, Said((404, "invalid_request_error", "model_not_found"))),
    (NotFound, Said((404, "invalid_request_error", "not_found"))),
    (WrongMethod, Said((405, "invalid_request_error", "method_not_allowed"))),
    (ContextExceeded, Said((400, "invalid_request_error", "context_length_exceeded"))),
    (TooLarge, Said((413, "invalid_request_error", "too_large"))),
    (Invalid, Said((400, "invalid_request_error", "invalid"))),
    (Overloaded, Said((429, "rate_limit_error", "overloaded"))),
    (Unavailable, Said((503, "server_error", "unavailable"))),
    (DeadlineExceeded, Said((504, "server_error", "deadline_exceeded"))),
    (Cancelled, Said((499, "invalid_request_error", "cancelled"))),
    (Refused, Said((500, "server_error", "refused"))),
    (Internal, Said((500, "server_error", "internal"))),
    (TsukimiError, Said((500, "server_error", None))),
)
"""First match counts."""


def said_of(error: TsukimiError) -> Said:
    return next(said for cls, said in TABLE if isinstance(error, cls))


def status_of(error: TsukimiError) -> int:
    return said_of(error)[0]


def error_object(error: TsukimiError) -> dict[str, Any]:
    """`{"error": {...}}`. The text of an Internal goes to the log only, never to the client."""
    _, type_, code = said_of(error)
    message = "internal error" if isinstance(error, Internal) else error.message or error.code
    return {"error": {"message": message, "type": type_, "param": error.param, "code": code or error.code}}


def retry_after(error: TsukimiError) -> int | None:
    """Whole seconds for the Retry-After header, if another try may succeed."""
    if status_of(error) not in (429, 503):
        return None
    return max(1, math.ceil(error.retry_after_s or RETRY_AFTER_S))


def log_level(error: TsukimiError) -> str:
    return "error" if isinstance(error, Internal | Refused) else "info"
