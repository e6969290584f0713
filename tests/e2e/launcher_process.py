"""A launcher in the foreground of its own process, for tests of the launcher itself (others: processes.launched)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes.launched import free_port
from tests.support.processes.spawn import spawn, tail, wait_until
from tsukimi.local.processes import ProcessId, is_alive
from tsukimi.local.rundir import ClusterState, RunDir

ROLES = ("gateway", "conductor", "prefill", "decode", "cache")
STAND_INS = [word for role in ROLES for word in ("--use", f"{role}=tests.e2e.standin")]
"""Arguments of `up` that put tests.e2e.standin in every role."""


class LauncherProcess:
    """One run dir and the launcher in it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.run_dir = RunDir(folder)
        self.output = folder.with_suffix(".out")
        self.port = free_port()
        self.arguments = ["up", "--run-dir", str(folder), "--port", str(self.port), *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = spawn([sys.executable, "-m", "tsukimi", *self.arguments], log=self.output)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: self._ended() or "Ready: " in self.said(), timeout_s, "the cluster is ready")
        assert not self._ended(), self.said()

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def state(self) -> ClusterState:
        state = self.run_dir.read()
        assert state is not None
        return state

    def pid(self, name: str) -> int:
        return next((p.process.pid for p in self.state().processes if p.name == name), 0)

    def processes(self) -> list[ProcessId]:
        return [p.process for p in self.state().processes]

    def kill(self, name: str) -> None:
        """SIGKILL a node and wait until the launcher has another of that name ready."""
        old, seen = self.pid(name), self.said().count(f"{name:<12} ready")
        os.kill(old, signal.SIGKILL)
        wait_until(
            lambda: self.pid(name) not in (0, old) and self.said().count(f"{name:<12} ready") > seen,
            30.0,
            f"{name} is back\n{tail(self.output)}",
        )

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another command of the toolbox on the same run dir."""
        return subprocess.run(
            [sys.executable, "-m", "tsukimi", *words, "--run-dir", str(self.run_dir.path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def wait_end(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process is not None and not self._ended():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _ended(self) -> bool:
        return self.process is None or self.process.poll() is not None


@contextlib.contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[LauncherProcess]:
    """A ready cluster, stopped in the end."""
    cluster = LauncherProcess(folder, *arguments)
    try:
        cluster.start()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.end()


def can_connect(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def nothing_left(processes: list[ProcessId], *ports: int) -> bool:
    return not any(is_alive(p) for p in processes) and not any(can_connect(port) for port in ports)
