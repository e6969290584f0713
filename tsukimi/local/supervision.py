"""When a service of the local cluster is started, restarted, given up and stopped.

Pure: it knows names and lives, not processes. A service starts once all services that it needs have been ready. A dead
one is started again after a delay, which doubles while deaths are recent. The whole cluster ends, with the reason, when
a service reports a configuration error (exit code 78) or dies `give_up_after` times in a row without becoming ready.
Services stop in waves, so that a gateway can finish its streams while the nodes behind it still work.
"""

from __future__ import annotations

import signal

from msgspec import Struct

from shared.core.machine import Command, Event
from shared.io.config import CONFIG_EXIT_CODE
from tsukimi.local.supervision_events import (
    Finish,
    LaunchAsked,
    Phase,
    ProcessExited,
    ProcessStarted,
    ReportFailure,
    ReportReady,
    ServiceSpec,
    ServiceView,
    ShowStage,
    SignalProcess,
    StageSeen,
    StartFailed,
    StartProcess,
    StopAsked,
    Tell,
    Ticked,
)


class RestartPolicy(Struct, frozen=True):
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    recent_s: float = 60.0
    """Deaths older than this no longer lengthen the delay."""
    give_up_after: int = 5
    """Lives in a row that ended before they were ready."""


class _Service:
    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.phase: Phase = "waiting"
        self.pid = 0
        self.stage = ""
        self.detail = ""
        self.was_ready = False
        """Whether any life of it was ready: the services that need it wait for that."""
        self.ready_now = False
        self.ready_this_life = False
        self.failures = 0
        self.deaths: list[float] = []
        self.restarts = 0
        self.due_at = 0.0
        self.kill_at: float | None = None

    @property
    def alive(self) -> bool:
        return self.phase in ("starting", "running")


class Supervisor:
    """The machine. Only `handle` changes it. Unknown names and old pids are ignored."""

    def __init__(self, specs: tuple[ServiceSpec, ...], policy: RestartPolicy | None = None) -> None:
        self._services = {spec.name: _Service(spec) for spec in specs}
        self._policy = policy or RestartPolicy()
        self._stopping = False
        self._insisted = False
        self._failed = False
        self._reported_ready = False
        self._finished = False

    def view(self) -> tuple[ServiceView, ...]:
        return tuple(
            ServiceView(s.spec.name, s.phase, s.pid, s.stage, s.detail, s.restarts)
            for s in self._services.values()
        )

    @property
    def stopping(self) -> bool:
        return self._stopping

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case LaunchAsked():
                return self._start_due(now)
            case ProcessStarted():
                return self._started(event, now)
            case StartFailed():
                return self._ended(event.name, f"could not be started ({event.error})", None, now)
            case ProcessExited():
                return self._ended(event.name, describe_exit(event.code), event.code, now)
            case StageSeen():
                return self._stage_seen(event, now)
            case StopAsked():
                return self._stop_asked(event, now)
            case Ticked():
                return self._kill_late(now) if self._stopping else self._start_due(now)
        return []

    def check(self) -> None:
        for s in self._services.values():
            assert (s.pid != 0) == (s.phase == "running"), f"{s.spec.name}: pid {s.pid} while {s.phase}"
            assert s.phase == "running" or not s.ready_now, f"{s.spec.name}: ready while {s.phase}"
            assert s.failures <= self._policy.give_up_after, (
                f"{s.spec.name}: {s.failures} failures and still tried"
            )
        if self._finished:
            assert not any(s.alive for s in self._services.values()), "finished while a process lives"

    # -- starting ----------------------------------------------------------------------------------------------------

    def _start_due(self, now: float) -> list[Command]:
        if self._stopping:
            return []
        commands: list[Command] = []
        for s in self._services.values():
            waiting = s.phase == "waiting" and all(self._services[n].was_ready for n in s.spec.needs)
            if waiting or (s.phase == "backing_off" and now >= s.due_at):
                s.phase = "starting"
                commands.append(StartProcess(s.spec.name))
        return commands

    def _started(self, event: ProcessStarted, now: float) -> list[Command]:
        s = self._services.get(event.name)
        if s is None or s.phase != "starting":
            return []
        s.phase, s.pid, s.stage, s.detail, s.ready_this_life = "running", event.pid, "starting", "", False
        if self._stopping:
            return self._terminate(s, now)
        return [ShowStage(event.name, "starting")]

    def _stage_seen(self, event: StageSeen, now: float) -> list[Command]:
        s = self._services.get(event.name)
        if (
            s is None
            or s.phase != "running"
            or event.pid != s.pid
            or (event.stage, event.detail) == (s.stage, s.detail)
        ):
            return []
        s.stage, s.detail, s.ready_now = event.stage, event.detail, event.stage == "ready"
        commands: list[Command] = [ShowStage(event.name, event.stage, event.detail)]
        if s.ready_now:
            s.was_ready, s.ready_this_life, s.failures = True, True, 0
            commands += self._start_due(now)
        if (
            not self._reported_ready
            and not self._stopping
            and all(s.ready_now for s in self._services.values())
        ):
            self._reported_ready = True
            commands.append(ReportReady())
        return commands

    # -- deaths ------------------------------------------------------------------------------------------------------

    def _ended(self, name: str, how: str, code: int | None, now: float) -> list[Command]:
        s = self._services.get(name)
        if s is None or not s.alive:
            return []
        s.phase, s.pid, s.stage, s.detail, s.ready_now, s.kill_at = "gone", 0, "", "", False, None
        if self._stopping:
            return [ShowStage(name, "stopped"), *self._next_wave(now)]
        s.failures = 0 if s.ready_this_life else s.failures + 1
        if code == CONFIG_EXIT_CODE:
            return self._give_up(name, "cannot work with its configuration (exit code 78)", now)
        if s.failures >= self._policy.give_up_after:
            return self._give_up(name, f"{how}, {s.failures} times in a row without becoming ready", now)
        delay_s = self._delay(s, now)
        s.phase, s.due_at, s.restarts = "backing_off", now + delay_s, s.restarts + 1
        return [Tell(name, f"{how}; restarting in {delay_s:.1f} s"), ShowStage(name, "restarting", how)]

    def _delay(self, s: _Service, now: float) -> float:
        s.deaths = [t for t in (*s.deaths[-16:], now) if now - t < self._policy.recent_s]
        return min(self._policy.max_delay_s, self._policy.first_delay_s * 2.0 ** (len(s.deaths) - 1))

    def _give_up(self, name: str, why: str, now: float) -> list[Command]:
        self._failed = True
        self._begin_stop()
        return [ShowStage(name, "failed", why), ReportFailure(name, why), *self._next_wave(now)]

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _stop_asked(self, event: StopAsked, now: float) -> list[Command]:
        if self._stopping:
            self._insisted = True
            return [self._kill(s) for s in self._services.values() if s.phase == "running"]
        self._begin_stop()
        return [Tell("", event.reason or "stopping"), *self._next_wave(now)]

    def _begin_stop(self) -> None:
        self._stopping = True
        for s in self._services.values():
            if not s.alive:
                s.phase = "gone"

    def _next_wave(self, now: float) -> list[Command]:
        alive = [s for s in self._services.values() if s.alive]
        if not alive:
            if self._finished:
                return []
            self._finished = True
            return [Finish(self._failed)]
        wave = min(s.spec.stop_wave for s in alive)
        running = [
            s for s in alive if s.phase == "running" and s.spec.stop_wave == wave and s.kill_at is None
        ]
        return [c for s in running for c in self._terminate(s, now)]

    def _terminate(self, s: _Service, now: float) -> list[Command]:
        s.kill_at = now + s.spec.grace_s
        if self._insisted:
            return [self._kill(s)]
        return [ShowStage(s.spec.name, "stopping"), SignalProcess(s.spec.name, s.pid)]

    def _kill_late(self, now: float) -> list[Command]:
        late = [
            s
            for s in self._services.values()
            if s.phase == "running" and s.kill_at is not None and now >= s.kill_at
        ]
        commands: list[Command] = []
        for s in late:
            s.kill_at = now + s.spec.grace_s
            commands += [Tell(s.spec.name, f"did not stop in {s.spec.grace_s:.0f} s; killed"), self._kill(s)]
        return commands

    def _kill(self, s: _Service) -> SignalProcess:
        return SignalProcess(s.spec.name, s.pid, kill=True)


def describe_exit(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
