"""The compose file's cluster, under a project name of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes.launched import free_port

ROOT = Path(__file__).parents[2]
PROJECT = "tsukimi-test"
MODEL = "smollm2-135m"


def why_no_engine() -> str:
    """Why containers cannot be run here; empty if they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers"
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        return "docker has no compose plugin"
    return ""


class Stack:
    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = os.environ | {
            "TSUKIMI_PORT": str(self.port), "TSUKIMI_MODEL": MODEL, "TSUKIMI_DTYPE": "float32",
            "TSUKIMI_KV_BYTES": str(256 << 20), "TSUKIMI_POOL_BYTES": str(256 << 20),
        }  # fmt: skip

    def compose(self, *words: str, timeout_s: float = 600.0) -> str:
        return docker(
            "compose", "--project-name", PROJECT, *words, environment=self._environment, timeout_s=timeout_s
        )

    def containers(self, service: str) -> list[str]:
        """Ids of the service's running containers."""
        return self.compose("ps", "--quiet", "--status", "running", service).split()

    def states(self) -> list[dict[str, Any]]:
        """Of all containers, ended ones included."""
        return [json.loads(line) for line in self.compose("ps", "--all", "--format", "json").splitlines()]

    def status(self) -> dict[str, Any]:
        """What `tsukimi status` says inside."""
        found: dict[str, Any] = json.loads(
            self.compose("exec", "-T", "gateway", "tsukimi", "status", "--json")
        )
        return found

    def nodes(self, role: str) -> list[dict[str, Any]]:
        return [n for n in self.status()["nodes"] if n["role"] == role]

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            assert time.monotonic() < deadline, f"not ready\n{self.compose('ps', '--all')}\n{self.tail()}"
            time.sleep(0.5)

    def wait_healthy(self, timeout_s: float = 120.0) -> None:
        """Every running container's own health check says so."""
        deadline = time.monotonic() + timeout_s
        while not all(c["Health"] == "healthy" for c in self.states() if c["State"] == "running"):
            assert time.monotonic() < deadline, self.compose("ps", "--all")
            time.sleep(0.5)

    def tail(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "15")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def docker(*words: str, environment: dict[str, str] | None = None, timeout_s: float = 600.0) -> str:
    done = subprocess.run(
        ["docker", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@contextmanager
def stack(*up: str) -> Iterator[Stack]:
    """Build, start, wait until ready; in the end nothing is left, volumes included."""
    it = Stack()
    it.compose("down", "--volumes", "--remove-orphans")
    try:
        it.compose("build", timeout_s=1500)
        it.compose("up", "--detach", *up, timeout_s=600)
        it.wait_ready()
        yield it
    finally:
        it.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")
