"""Requests that wait for their reply, and streams that wait for word that nobody listens. All share one inbox; a token
tells them apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from shared.protocol.errors import TsukimiError, Unavailable, WireError
from shared.protocol.wire import decode

_with_error: dict[Any, Any] = {}


def decode_reply(data: bytes, reply: Any) -> Any:
    """Decode as `reply`. Raises what a WireError says, and Invalid on anything else."""
    either = _with_error.get(reply)
    if either is None:
        either = _with_error[reply] = reply | WireError
    message = decode(data, either)
    if isinstance(message, WireError):
        raise message.to_exception()
    return message


class Replies:
    """Owns the futures of all requests under way on one connection. A late, repeated or foreign reply is dropped."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        """Subject prefix; replies arrive on `<inbox>.<token>`."""
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._watched: dict[str, Callable[[], None]] = {}
        self._tokens = itertools.count()

    def open(self) -> tuple[str, asyncio.Future[bytes]]:
        """A reply subject of its own and the future of what arrives there. Must be closed."""
        subject = self._fresh()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = future
        return subject, future

    def close(self, subject: str) -> None:
        future = self._waiting.pop(subject, None)
        if future is not None:
            future.cancel()

    def deliver(self, subject: str, data: bytes) -> None:
        future = self._waiting.get(subject)
        if future is not None and not future.done():
            future.set_result(data)

    def fail(self, subject: str, error: TsukimiError) -> None:
        future = self._waiting.get(subject)
        if future is not None and not future.done():
            future.set_exception(error)

    @contextlib.contextmanager
    def watch(self, unheard: Callable[[], None]) -> Iterator[str]:
        """While the block runs, a reply subject for what is published to others. If the bus has nobody to give a message
        to, it answers there, and `unheard` is called. Anything else that arrives there is dropped."""
        subject = self._fresh()
        self._watched[subject] = unheard
        try:
            yield subject
        finally:
            del self._watched[subject]

    def unheard(self, subject: str) -> None:
        tell = self._watched.get(subject)
        if tell is not None:
            tell()

    def _fresh(self) -> str:
        return f"{self.inbox}.{next(self._tokens)}"

    def fail_all(self, why: str) -> None:
        """The connection is gone: no reply will come."""
        for subject in list(self._waiting):
            self.fail(subject, Unavailable(why))
