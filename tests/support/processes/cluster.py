"""A cluster of real services as OS processes on a real nats-server, without the launcher: tests may kill any of them.

    with cluster(tmp_path, decode=2) as c:
        httpx.post(f"{c.url}/v1/completions", ...)
        c.kill("decode-0")
        c.start("decode-0")
        c.wait_ready()

All processes end with the block; an AssertionError names any that did not. All methods block, and some start processes.
Call them from the main thread, because children die with the thread that started them. They are short enough for async
tests.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx

from shared.protocol.cluster import NodeInfo, NodeLoad
from shared.protocol.ids import Role
from tests.support.processes.nats import NatsServer
from tests.support.processes.observer import Observer
from tests.support.processes.spawn import free_port, spawn, tail, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
MODULES: dict[Role, str] = {
    "gateway": "services.gateway",
    "conductor": "services.conductor",
    "prefill": "services.prefill",
    "decode": "services.decode",
    "cache": "services.cache_node",
}
NATS = "nats"
Fields = Mapping[str, str | int | float]


class Cluster:
    """Handles on the processes. Node names are `<role>-<number>`; `nats` names the server."""

    def __init__(
        self,
        folder: Path,
        counts: Mapping[Role, int],
        fields: Mapping[Role, Fields],
        modules: Mapping[Role, str],
    ) -> None:
        self.folder = folder
        self.nats = NatsServer(folder)
        self._fields = fields
        self._modules = modules
        self._roles: dict[str, Role] = {
            f"{role}-{n}": role for role, count in counts.items() for n in range(count)
        }
        self._ports: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lives: dict[str, str] = {}
        self.observer: Observer

    # -- what it is like ---------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        return f"http://{self.infos['gateway-0'].http}"

    @property
    def infos(self) -> dict[str, NodeInfo]:
        return self.observer.infos

    @property
    def loads(self) -> dict[str, NodeLoad]:
        return self.observer.loads

    def nodes(self, role: Role | None = None) -> list[str]:
        return [node for node, its in self._roles.items() if role in (None, its)]

    def counters(self, role: Role) -> dict[str, float]:
        """Sum of the counters in the last heartbeats of a role's nodes."""
        total: dict[str, float] = {}
        for node in self.nodes(role):
            for name, value in self.loads[node].counters.items() if node in self.loads else ():
                total[name] = total.get(name, 0.0) + value
        return total

    def pid(self, node: str) -> int:
        return self.nats.pid if node == NATS else self._processes[node].pid

    def running(self, node: str) -> bool:
        return node in self._processes and self._processes[node].poll() is None

    def log_path(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def logs(self, lines: int = 15) -> str:
        """The tails of all logs, for assertion messages."""
        return "\n".join(f"== {node}\n{tail(self.log_path(node), lines)}" for node in (*self._roles, NATS))

    # -- doing things to it ------------------------------------------------------------------------------------------

    def start(self, node: str) -> None:
        """Start it (again). Does not wait: see wait_ready."""
        if node == NATS:
            self.nats.start()
            return
        assert not self.running(node), f"{node} is running"
        before = self.infos.get(node)
        self._lives[node] = before.ref.incarnation if before else ""
        self._processes[node] = spawn(self._arguments(node), log=self.log_path(node), cwd=REPOSITORY)

    def kill(self, node: str) -> None:
        """kill -9; returns once it is gone."""
        if node == NATS:
            self.nats.kill()
            return
        self._processes[node].kill()
        self._processes[node].wait(10.0)

    def term(self, node: str, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns its exit code."""
        if node == NATS:
            self.nats.stop()
            return 0
        self._processes[node].send_signal(signal.SIGTERM)
        return self._processes[node].wait(timeout_s)

    def send_signal(self, node: str, number: signal.Signals) -> None:
        self._processes[node].send_signal(number)

    def restart(self, node: str, *, kill: bool = False) -> None:
        if kill:
            self.kill(node)
        else:
            self.term(node)
        self.start(node)

    def wait_ready(self, *nodes: str, timeout_s: float = 120.0) -> None:
        """Wait until these nodes (default: all) have announced, in their newest life, that they are ready. By default,
        also wait until every gateway knows enough ready nodes to serve."""
        for node in nodes or tuple(self._roles):
            self.wait_for(lambda node=node: self._ready(node), timeout_s, f"{node} is ready")  # type: ignore[misc]
        if not nodes and self.nodes("decode"):
            for node in self.nodes("gateway"):
                url = f"http://{self.infos[node].http}/ready"
                self.wait_for(lambda url=url: _serves(url), timeout_s, f"{node} serves")  # type: ignore[misc]

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Wait until no node runs, queues or holds anything."""
        self.wait_for(
            lambda: all(_idle(load) for load in list(self.loads.values())), timeout_s, "all is idle"
        )

    def wait_for(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            wait_until(holds, timeout_s, what)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.logs()}") from e

    def begin(self) -> None:
        self.nats.start()
        self.observer = Observer(self.nats.url)
        for node in self._roles:
            self.start(node)

    def end(self) -> None:
        """Send SIGTERM to all, then SIGKILL to those left. AssertionError if a node did not exit with 0 by itself."""
        running = [node for node in self._roles if self.running(node)]
        for node in running:
            self._processes[node].terminate()
        wrong: list[str] = []
        for node in running:
            try:
                code = self._processes[node].wait(20.0)
            except subprocess.TimeoutExpired:
                self._processes[node].kill()
                self._processes[node].wait(10.0)
                wrong.append(f"{node} did not end on SIGTERM")
                continue
            if code != 0:
                wrong.append(f"{node} exited with {code}")
        if hasattr(self, "observer"):
            self.observer.close()
        self.nats.stop()
        assert not wrong, f"{wrong}\n{self.logs()}"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _arguments(self, node: str) -> list[str]:
        role = self._roles[node]
        fields: dict[str, str | int | float] = {
            "node": node,
            "nats_url": self.nats.url,
            **self._fields.get(role, {}),
        }
        if role == "gateway":
            fields.setdefault("port", self._ports.setdefault(node, free_port()))
        flags = [
            word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return [sys.executable, "-m", self._modules[role], *flags]

    def _ready(self, node: str) -> bool:
        process = self._processes[node]
        assert process.poll() is None, f"{node} exited with {process.returncode}"
        info = self.infos.get(node)
        return info is not None and info.stage == "ready" and info.ref.incarnation != self._lives[node]


def _idle(load: NodeLoad) -> bool:
    return load.running == load.waiting == load.kv_blocks_held == 0 and not load.attempts


def _serves(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def cluster(
    folder: Path,
    *,
    gateway: int = 1,
    conductor: int = 1,
    prefill: int = 1,
    decode: int = 1,
    cache: int = 1,
    model: str = "toy",
    fields: Mapping[Role, Fields] | None = None,
    modules: Mapping[Role, str] | None = None,
    ready: bool = True,
) -> Iterator[Cluster]:
    """Start it in `folder` (logs go there) and wait until all is ready.

    `fields`: extra settings by role. `modules`: programs to run instead of those in MODULES.
    """
    given = fields or {}
    counts: dict[Role, int] = {
        "conductor": conductor,
        "cache": cache,
        "prefill": prefill,
        "decode": decode,
        "gateway": gateway,
    }
    compute: Fields = {"model": model, "threads": 1, "kv_bytes": 64 << 20}
    defaults: dict[Role, Fields] = {
        "prefill": compute,
        "decode": compute,
        "cache": {"pool_bytes": 64 << 20},
        "gateway": {"model": model},
    }
    merged: dict[Role, Fields] = {role: {**defaults.get(role, {}), **given.get(role, {})} for role in counts}
    c = Cluster(folder, counts, merged, {**MODULES, **(modules or {})})
    try:
        c.begin()
        if ready:
            c.wait_ready()
        yield c
    except BaseException:
        with contextlib.suppress(AssertionError):
            c.end()
        raise
    c.end()
