"""A real nats-server for one test, on a free port. It can be stopped, killed, and restarted on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.processes.spawn import free_port, program, spawn, tail, wait_until


class NatsServer:
    """Owns one server process and the folder it runs in. Constructing it does not start the server."""

    def __init__(self, folder: Path, *, config: str = "") -> None:
        """`config`: lines of a nats-server configuration file, e.g. `max_payload: 2000`."""
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._config = folder / "nats.conf"
        self._config.write_text(config)
        self._log = folder / "nats.log"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start or restart it on the same port. Returns once it accepts connections."""
        assert self._process is None, "already running"
        args = [program("nats-server"), "-a", "127.0.0.1", "-p", str(self.port), "-c", str(self._config)]
        self._process = spawn(args, log=self._log, cwd=self.folder)
        wait_until(self._listening, 60.0, f"nats-server listens\n{tail(self._log)}")

    def stop(self) -> None:
        """Stop it gracefully. Idempotent."""
        self._end(kill=False)

    def kill(self) -> None:
        self._end(kill=True)

    def restart(self) -> None:
        self.stop()
        self.start()

    def reconfigure(self, config: str) -> None:
        """Make the running server load another configuration."""
        self._config.write_text(config)
        os.kill(self.pid, signal.SIGHUP)

    def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            process.terminate()
        process.wait(10.0)

    def _listening(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"nats-server ended\n{tail(self._log)}"
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0


@contextlib.asynccontextmanager
async def nats_server(config: str = "") -> AsyncIterator[NatsServer]:
    with tempfile.TemporaryDirectory(prefix="tsukimi-nats-") as folder:
        server = NatsServer(Path(folder), config=config)
        server.start()
        try:
            yield server
        finally:
            await asyncio.to_thread(server.stop)
