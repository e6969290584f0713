"""A whole cluster under the real launcher, as users run it: `tsukimi up --detach`, in its own run folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tsukimi.errors import ToolError
from tsukimi.local.rundir import RunDir
from tsukimi.status import ask, to_json

UP_TIMEOUT_S = 240.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Launched:
    """Handle on a running cluster."""

    def __init__(self, run_dir: Path, port: int) -> None:
        self.run_dir = run_dir
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def tsukimi(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run a `tsukimi` command on this cluster and return its output. Raises if the command fails."""
        done = subprocess.run(
            [sys.executable, "-m", "tsukimi", *arguments, "--run-dir", str(self.run_dir)],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"tsukimi {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What `tsukimi status --json` prints, obtained without starting a process, which would take a second."""
        state = RunDir(self.run_dir).read()
        assert state is not None, "no cluster runs here"
        with ThreadPoolExecutor(1) as aside:  # the caller may already be running an event loop
            found = aside.submit(asyncio.run, ask(state.nats_url))
            try:
                return dict(json.loads(to_json(found.result())))
            except ToolError as e:
                raise AssertionError(str(e)) from e

    def node(self, name: str) -> dict[str, Any]:
        return next(n for n in self.status()["nodes"] if n["node"] == name)

    def counters(self, role: str) -> dict[str, float]:
        """Sum of the counters of a role's nodes."""
        total: dict[str, float] = {}
        for node in self.status()["nodes"]:
            if node["role"] == role:
                for name, value in node["counters"].items():
                    total[name] = total.get(name, 0.0) + value
        return total

    def pid(self, name: str) -> int:
        """The OS process of a node, or of `nats`."""
        state = RunDir(self.run_dir).read()
        assert state is not None
        return next(p.process.pid for p in state.processes if p.name == name)

    def signal(self, name: str, signum: signal.Signals) -> int:
        pid = self.pid(name)
        os.kill(pid, signum)
        return pid

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the gateway answers /ready with 200."""
        self.wait_for(
            lambda: httpx.get(f"{self.url}/ready", timeout=5).status_code == 200, timeout_s, "/ready"
        )

    def wait_idle(self, timeout_s: float = 15.0) -> dict[str, Any]:
        """Wait until no block is held and nothing runs. Returns the status at that time."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status["kv_blocks_held"] == 0 and status["running"] == 0 and status["waiting"] == 0:
                return status
            assert time.monotonic() < deadline, f"still held: {json.dumps(status)[:3000]}"
            time.sleep(0.3)

    def wait_for(self, condition: Any, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except (httpx.HTTPError, AssertionError, OSError, KeyError, StopIteration):
                pass
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s\n{self.log_tail()}"
            time.sleep(0.2)

    def log_tail(self, lines: int = 15) -> str:
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(
            f"== {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-lines:]) for p in logs
        )


@contextmanager
def launched(run_dir: Path, *flags: str) -> Iterator[Launched]:
    """Start with `tsukimi up --detach`, stop with `tsukimi down`, and leave nothing running."""
    port = free_port()
    cluster = Launched(run_dir, port)
    up = subprocess.run(
        [sys.executable, "-m", "tsukimi", "up", "--detach", "--port", str(port), "--run-dir", str(run_dir), *flags],
        capture_output=True, text=True, timeout=UP_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert up.returncode == 0, f"{up.stdout}\n{up.stderr}\n{cluster.log_tail()}"
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.tsukimi("down", timeout_s=90)
