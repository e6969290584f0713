"""Turns the errors of nats-py into this project's own. Every class of nats.errors is named here; a test checks that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nats import errors as nats

from shared.protocol.errors import (
    DeadlineExceeded,
    Internal,
    Invalid,
    Overloaded,
    Refused,
    TooLarge,
    TsukimiError,
    Unavailable,
)

MEANING: dict[type[Exception], type[TsukimiError]] = {
    # no connection now; it comes back by itself
    nats.ConnectionClosedError: Unavailable,
    nats.ConnectionDrainingError: Unavailable,
    nats.ConnectionReconnectingError: Unavailable,
    nats.NoServersError: Unavailable,
    nats.StaleConnectionError: Unavailable,
    nats.UnexpectedEOF: Unavailable,
    nats.ProtocolError: Unavailable,
    nats.JsonParseError: Unavailable,
    # nobody there, too late, or too much
    nats.NoRespondersError: Unavailable,
    nats.TimeoutError: DeadlineExceeded,
    nats.FlushTimeoutError: DeadlineExceeded,
    nats.DrainTimeoutError: DeadlineExceeded,
    nats.OutboundBufferLimitError: Overloaded,
    nats.SlowConsumerError: Overloaded,
    nats.MaxPayloadError: TooLarge,
    # the server rejects us
    nats.AuthorizationError: Refused,
    nats.InvalidUserCredentialsError: Refused,
    nats.SecureConnRequiredError: Refused,
    nats.SecureConnWantedError: Refused,
    nats.SecureConnFailedError: Refused,
    # a subject or header that came from outside
    nats.BadSubjectError: Invalid,
    nats.BadHeaderError: Invalid,
    # wrong use of the client: bugs here
    nats.BadSubscriptionError: Internal,
    nats.BadTimeoutError: Internal,
    nats.InvalidCallbackTypeError: Internal,
    nats.ServerNotInPoolError: Internal,
    nats.NotJSMessageError: Internal,
    nats.MsgAlreadyAckdError: Internal,
    nats.Error: Invalid,  # the bare class: malformed URLs and other arguments
}


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of nats-py, and of the socket under it, as TsukimiErrors."""
    try:
        yield
    except nats.Error as e:
        kind = next(MEANING[c] for c in type(e).__mro__ if c in MEANING)
        raise kind(str(e), retry_after_s=0.5 if kind is Overloaded else None) from e
    except ConnectionError as e:
        raise Unavailable(f"the connection was lost: {e}") from e
