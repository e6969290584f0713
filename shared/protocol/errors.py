"""All expected errors.

    TsukimiError
    ├── Invalid            the request is wrong; names the field; never retried
    │   └── TooLarge       it does not fit a limit; carries both sizes
    ├── Overloaded         refused now; carries retry_after_s
    ├── Unavailable        no node can serve it now; retried elsewhere
    ├── DeadlineExceeded   its time budget ran out
    ├── BlockMissing       a KVCache block is not there; recompute
    ├── BlockCorrupt       a KVCache block failed its checksum; drop and recompute
    ├── Refused            a peer speaks another layout, namespace or version; loud, never retried
    ├── Cancelled          the client disconnected or cancelled
    └── Internal           a bug; details stay in the log

Anything else is a bug: logged with its traceback and sent as Internal.
"""

from __future__ import annotations

from msgspec import Struct


class TsukimiError(Exception):
    """Base. `code` is stable and goes over the wire; `retryable` says whether it may work on another node or
    later."""

    code = "internal"
    retryable = False

    def __init__(
        self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> WireError:
        return WireError(
            code=self.code, message=self.message, param=self.param, retry_after_s=self.retry_after_s
        )


class Invalid(TsukimiError):
    code = "invalid"


class TooLarge(Invalid):
    code = "too_large"


class Overloaded(TsukimiError):
    code = "overloaded"
    retryable = True


class Unavailable(TsukimiError):
    code = "unavailable"
    retryable = True


class DeadlineExceeded(TsukimiError):
    code = "deadline_exceeded"
    retryable = True


class BlockMissing(TsukimiError):
    code = "block_missing"
    retryable = True


class BlockCorrupt(TsukimiError):
    code = "block_corrupt"
    retryable = True


class Refused(TsukimiError):
    code = "refused"


class Cancelled(TsukimiError):
    code = "cancelled"


class Internal(TsukimiError):
    code = "internal"


RETRY_LEAST_S, RETRY_MOST_S = 0.1, 60.0


def retry_within_reason(seconds: float) -> float:
    """A computed time to the next try, within what is sensible to tell a client."""
    return min(max(seconds, RETRY_LEAST_S), RETRY_MOST_S)


class WireError(Struct, frozen=True, tag="error"):
    """An error as a message."""

    code: str
    message: str = ""
    param: str | None = None
    retry_after_s: float | None = None

    def to_exception(self) -> TsukimiError:
        cls = BY_CODE.get(self.code, Internal)
        return cls(self.message, param=self.param, retry_after_s=self.retry_after_s)


BY_CODE: dict[str, type[TsukimiError]] = {
    c.code: c
    for c in (
        Invalid, TooLarge, Overloaded, Unavailable, DeadlineExceeded, BlockMissing, BlockCorrupt, Refused,
        Cancelled, Internal,
    )
}  # fmt: skip
