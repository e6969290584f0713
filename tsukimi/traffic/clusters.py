"""Clusters of a benchmark's own, on free ports, gone when it ends."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from tsukimi import cluster_url, status
from tsukimi.errors import ToolError


class BenchCluster(Struct, frozen=True):
    """A cluster that is up."""

    url: str
    """The gateway's."""
    run_dir: Path

    def engine_s(self) -> dict[str, float]:
        """Seconds that each compute node's engine has computed since it started."""
        nodes = asyncio.run(status.ask(cluster_url.nats_url("", self.run_dir))).nodes
        return {n.node: n.counters["engine_s"] for n in nodes if n.role in status.COMPUTE}


@contextmanager
def cluster(*flags: str) -> Iterator[BenchCluster]:
    """Start a cluster as `tsukimi up` does with these flags. Raises ToolError if it does not come up."""
    with tempfile.TemporaryDirectory(prefix="tsukimi-bench-") as run_dir:
        command = [sys.executable, "-m", "tsukimi"]
        port = _free_port()
        up = [*command, "up", "--detach", "--run-dir", run_dir, "--port", str(port), *flags]
        started = subprocess.run(up, capture_output=True, text=True, check=False)
        try:
            if started.returncode:
                raise ToolError(f"the cluster did not start: {(started.stdout + started.stderr)[-500:]}")
            yield BenchCluster(f"http://127.0.0.1:{port}", Path(run_dir))
        finally:
            subprocess.run([*command, "down", "--run-dir", run_dir], capture_output=True, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
