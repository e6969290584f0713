"""Carries out what the supervisor decides: processes, signals, the state file, the screen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

from msgspec import Struct

from shared.core.machine import Command, Event
from shared.io.driver import Driver
from tsukimi.local import supervision_events as sv
from tsukimi.local.plan import NATS
from tsukimi.local.processes import ProcessId, identify, send, spawn
from tsukimi.local.report import Report
from tsukimi.local.rundir import ClusterPhase, ClusterState, ProcessState, RunDir, display_path, tail
from tsukimi.local.supervision import Supervisor
from tsukimi.local.watch import watch_nats, watch_nodes
from tsukimi.probe import http_status

TICK_S = 0.1
TAIL_LINES = 15


class Addresses(Struct, frozen=True):
    nats_port: int
    http_host: str
    http_port: int

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"

    @property
    def url(self) -> str:
        return f"http://{self.http_host}:{self.http_port}"


class Launcher:
    """One cluster's life, from `run` to its return. The run dir must be claimed; the caller releases it."""

    def __init__(
        self, specs: tuple[sv.ServiceSpec, ...], run_dir: RunDir, addresses: Addresses, model: str, report: Report,
        summary: list[str],
    ) -> None:  # fmt: skip
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run_dir
        self._addresses = addresses
        self._model = model
        self._report = report
        self._summary = summary
        self._supervisor = Supervisor(specs)
        self._running: dict[str, ProcessId] = {}
        self._ready = False
        self._error = ""
        self._finished = asyncio.Event()
        self._nats_found = asyncio.Event()

    async def run(self) -> int:
        """Returns when no process is left: 0 if asked to stop, 1 if the cluster failed."""
        me = identify(os.getpid())
        assert me is not None
        self._me = me
        async with asyncio.TaskGroup() as tasks:
            self._driver: Driver[Event] = Driver(self._supervisor, self._execute, tasks=tasks)
            self._hear_signals()
            background = [
                tasks.create_task(self._driver.tick(sv.Ticked(), TICK_S)),
                tasks.create_task(self._watch_nodes()),
            ]
            self._tasks = tasks
            self._driver.feed(sv.LaunchAsked())
            await self._finished.wait()
            for task in background:
                task.cancel()
        return 1 if self._error else 0

    # -- commands ----------------------------------------------------------------------------------------------------

    def _execute(self, command: Command) -> Awaitable[Event | None] | None:
        match command:
            case sv.StartProcess():
                return self._start(command.name)
            case sv.SignalProcess():
                process = self._running.get(command.name)
                if process is not None and process.pid == command.pid:
                    send(process, signal.SIGKILL if command.kill else signal.SIGTERM)
            case sv.ShowStage():
                self._report.stage(command.name, command.stage, command.detail)
                self._write_state()
            case sv.Tell():
                self._report.tell(command.name, command.text)
            case sv.ReportReady():
                return self._confirm_ready()
            case sv.ReportFailure():
                self._fail(command)
            case sv.Finish():
                self._finished.set()
        return None

    async def _start(self, name: str) -> Event | None:
        """Start the process, wait for it, and report its end."""
        log = self._run_dir.log_of(name)
        try:
            process = await spawn(self._specs[name].argv, log)
        except OSError as e:
            return sv.StartFailed(name=name, error=str(e))
        known = identify(process.pid)
        if known is not None:
            self._running[name] = known
            self._write_state()
        self._driver.feed(sv.ProcessStarted(name=name, pid=process.pid))
        watch = self._tasks.create_task(self._watch_nats(process)) if name == NATS else None
        code = await process.wait()
        if watch is not None:
            watch.cancel()
        self._running.pop(name, None)
        return sv.ProcessExited(name=name, code=code)

    async def _confirm_ready(self) -> None:
        """Every node says it is ready. Wait until the gateway confirms it over HTTP."""
        asked = 0
        while not self._supervisor.stopping:
            status = await http_status(self._addresses.http_host, self._addresses.http_port, "/ready")
            if status == 200:
                self._report.summary(self._summary)
                self._ready = True
                self._write_state()  # after the summary, so that whoever waits for this state can read it
                return
            asked += 1
            if asked == 100:
                self._report.tell(
                    "", f"the nodes are ready, but GET /ready gives {status or 'no answer'}; still asking"
                )
            await asyncio.sleep(TICK_S)

    def _fail(self, failure: sv.ReportFailure) -> None:
        log = self._run_dir.log_of(failure.name)
        self._error = f"{failure.name}: it {failure.why}"
        self._report.failure(failure.name, failure.why, display_path(log), tail(log, TAIL_LINES))

    # -- events ------------------------------------------------------------------------------------------------------

    async def _watch_nats(self, process: asyncio.subprocess.Process) -> None:
        seen = await watch_nats(
            NATS, process.pid, self._addresses.nats_port, lambda: process.returncode is None
        )
        if seen is not None:
            self._nats_found.set()
            self._driver.feed(seen)

    async def _watch_nodes(self) -> None:
        await self._nats_found.wait()
        await watch_nodes(self._addresses.nats_url, self._driver.feed)

    def _hear_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signal_ in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(
                signal_, self._driver.feed, sv.StopAsked(reason=f"stopping ({signal_.name})")
            )

    def _write_state(self) -> None:
        self._run_dir.write(
            ClusterState(
                launcher=self._me, phase=self._phase(), nats_url=self._addresses.nats_url, url=self._addresses.url,
                model=self._model, error=self._error,
                processes=tuple(
                    ProcessState(name=n, process=p, log=str(Path(self._run_dir.log_of(n)).resolve()))
                    for n, p in self._running.items()
                ),
            )
        )  # fmt: skip

    def _phase(self) -> ClusterPhase:
        if self._error:
            return "failed"
        if self._supervisor.stopping:
            return "stopping"
        return "ready" if self._ready else "starting"
