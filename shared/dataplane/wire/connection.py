"""A connection with its two threads: one reads frames and hands them on, one sends what is queued."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

import structlog

from shared.dataplane.transports.base import Connection, PeerLost
from shared.dataplane.wire.framing import Frame
from shared.protocol.errors import Internal, TsukimiError

Job = Callable[[Connection], None]
"""Something to send. Runs in the sending thread; PeerLost ends the link."""

log = structlog.get_logger()


class FramedConnection:
    """Jobs go out in the order posted. Once over it stays over: `lost` says why, and `on_lost` has been or will be
    called, once, from a thread of the link, when neither of its threads touches any memory for it any more."""

    def __init__(
        self,
        open_: Callable[[], Connection],
        on_frame: Callable[[Frame, Connection], None],
        on_lost: Callable[[TsukimiError], None],
        *,
        name: str,
        queue_limit: int,
    ) -> None:
        """open_ connects and shakes hands, in the link's thread; what it raises is the reason the link is lost for."""
        self._open = open_
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._queue_limit = queue_limit
        self._changed = threading.Condition()
        self._jobs: collections.deque[Job] = collections.deque()
        self._connection: Connection | None = None
        self.lost: TsukimiError | None = None
        self.progress = 0
        """Grows with every job done and every frame received."""
        self._sender = threading.Thread(target=self._send_for_ever, name=f"{name}-send", daemon=True)
        self._reader = threading.Thread(target=self._run, name=f"{name}-read", daemon=True)

    def start(self) -> None:
        self._reader.start()

    @property
    def transport(self) -> str:
        """Name of the transport in use; empty until connected."""
        connection = self._connection
        return connection.name if connection is not None else ""

    def post(self, job: Job, *, wait: bool = False) -> bool:
        """Queue a job. With `wait`, blocks while the queue is full (others are few and small, and always queued).
        False when the link is lost: the job will not run."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.lost is not None or len(self._jobs) < self._queue_limit)
            if self.lost is not None:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def sever(self, reason: TsukimiError) -> None:
        """End it now, from any thread. Idempotent; the first reason stays."""
        with self._changed:
            if self.lost is None:
                self.lost = reason
            self._jobs.clear()
            self._changed.notify_all()
        if self._connection is not None:
            self._connection.cut()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for both threads, from neither of them. True when they have ended."""
        if self._reader.ident is not None:
            self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def _run(self) -> None:
        try:
            self._connect()
            self._sender.start()
            self._read_for_ever()
        except TsukimiError as e:
            self.sever(e)
        except Exception:
            log.exception("data_plane_link_failed", link=self._reader.name)
            self.sever(Internal("the data plane failed; see the log"))
        if self._sender.ident is not None:
            self._sender.join()
        if self._connection is not None:
            self._connection.close()
        assert self.lost is not None
        self._on_lost(self.lost)

    def _connect(self) -> None:
        connection = self._open()
        with self._changed:
            self._connection = connection
            lost = self.lost
        if lost is not None:
            raise lost

    def _read_for_ever(self) -> None:
        connection = self._connection
        assert connection is not None
        while self.lost is None:
            frame = connection.receive()
            self.progress += 1
            self._on_frame(frame, connection)

    def _send_for_ever(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            while (job := self._next_job()) is not None:
                job(connection)
                self.progress += 1
        except PeerLost as e:
            self.sever(e)
        except Exception:
            log.exception("data_plane_link_failed", link=self._sender.name)
            self.sever(Internal("the data plane failed; see the log"))

    def _next_job(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or bool(self._jobs))
            if self.lost is not None:
                return None
            job = self._jobs.popleft()
            self._changed.notify_all()
            return job
