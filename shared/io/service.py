"""The life of every service process, from its arguments to its exit code.

    configure -> connect -> build -> announce, start -> ready -> (SIGTERM) drain -> leave -> close -> exit 0

Exit codes: 0 after SIGTERM or SIGINT, 78 for a configuration that can't work, 1 for a bug (logged with its traceback).
A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import structlog
import uvloop

from shared.io.bus import Bus
from shared.io.config import CONFIG_EXIT_CODE, BaseConfig, ConfigError, HelpAsked, load_config, redacted
from shared.io.logging import configure_logging
from shared.io.nats_bus import NatsBus, connect
from shared.io.parent import die_with_parent, watch_parent
from shared.io.presence import Presence
from shared.io.recorder import Recorder
from shared.io.signals import Stop
from shared.protocol.cluster import NodeInfo, NodeLoad
from shared.protocol.errors import Invalid
from shared.protocol.ids import Incarnation, NodeId, Role, new_incarnation

log = structlog.get_logger(__name__)

HANDLERS_S = 1.0
"""Seconds for bus handlers that outlast the drain."""
CLOSE_S = 3.0
"""Seconds for App.close. A hung one must not keep the process."""
EXIT_S = 10.0
"""Most seconds from the end of draining to the exit, whatever hangs."""
LAST_S = 1.0
"""Seconds for threads to end after everything else has: one may be loading a model."""


class App(Protocol):
    """What a role does. Called on the event loop, one call at a time. Only info and load may be called at any time."""

    def info(self) -> NodeInfo:
        """The complete current announcement."""
        ...

    def load(self, seq: int) -> NodeLoad:
        """The current heartbeat."""
        ...

    async def start(self) -> None:
        """Subscribe, load, warm up; announce each stage. Returns when ready. Raises Invalid if it can never work."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Take nothing new. Return when nothing is left or the grace time is over."""
        ...

    async def close(self) -> None:
        """Free everything. Also called after a failed start or a crash."""
        ...


class Context:
    """What a service's App is given. `tasks` owns its background work. A failure there ends the process."""

    def __init__(
        self,
        bus: Bus,
        config: BaseConfig,
        incarnation: Incarnation,
        tasks: asyncio.TaskGroup,
        presence: Presence,
        recorder: Recorder | None,
    ) -> None:
        self.bus = bus
        self.config = config
        self.node: NodeId = config.node
        self.incarnation = incarnation
        self.host = config.host
        self.tasks = tasks
        self.recorder = recorder
        """For the driver of the node's machine; None unless config.record is set."""
        self._presence = presence

    async def announce_now(self) -> None:
        """Publish App.info(), and a heartbeat soon after. Without a connection this happens when it is back."""
        await self._presence.announce_now()

    def heartbeat_soon(self) -> None:
        """Something changed: send a heartbeat now, or as soon as the least interval allows."""
        self._presence.heartbeat_soon()


C = TypeVar("C", bound=BaseConfig)
Build = Callable[[Context, C], App]


def run(config_type: type[C], role: Role, build: Build[C]) -> None:
    """The whole of a service's __main__. Does not return; the process exits."""
    try:
        config = load_config(config_type, role, sys.argv[1:])
    except HelpAsked as e:
        print(e)
        sys.exit(0)
    except ConfigError as e:
        print(f"{role}: configuration: {e}", file=sys.stderr)
        sys.exit(CONFIG_EXIT_CODE)
    incarnation = new_incarnation()
    configure_logging(config.log_level, service=role, node=config.node, incarnation=incarnation)
    log.info("service_configured", config=redacted(config), pid=os.getpid())
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    sys.exit(uvloop.run(_watched(config, role, build, incarnation)))


class _Finished(Exception):
    """Ends the task group of a service that stopped in good order."""


async def _watched(config: C, role: Role, build: Build[C], incarnation: Incarnation) -> int:
    """Run the service, and end it when the process that it was started for ends."""
    if not config.parent_pid:
        return await _life(config, role, build, incarnation)
    watching = asyncio.ensure_future(watch_parent(config.parent_pid, _orphaned))
    try:
        return await _life(config, role, build, incarnation)
    finally:
        watching.cancel()


async def _life(config: C, role: Role, build: Build[C], incarnation: Incarnation) -> int:
    stop = Stop()
    stop.listen()
    bus = await stop.unless(connect(config.nats_url, name=config.node, close_timeout_s=HANDLERS_S))
    if bus is None:
        return 0
    presence = Presence(bus, role, config.node, incarnation, config.heartbeat_s)
    recorder = Recorder(config.record) if config.record else None
    code = 0
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch_bus(bus))
            context = Context(bus, config, incarnation, tasks, presence, recorder)
            with _permanent():
                app = build(context, config)
            try:
                await presence.begin(app, tasks)
                await _serve(app, config, stop)
            finally:
                await presence.leave()
                await bus.stop_listening()
                await _close(app)
            raise _Finished
    except* _Finished:
        pass
    except* ConfigError as group:
        log.error("configuration_failed", error=str(_first(group)))
        code = CONFIG_EXIT_CODE
    except* Exception as group:
        log.error("service_failed", exc_info=group)
        code = 1
    _exit_within(EXIT_S, code)
    await bus.close()
    if recorder is not None:
        recorder.close()
    log.info("service_ended", code=code)
    _exit_within(LAST_S, code)
    return code


async def _serve(app: App, config: BaseConfig, stop: Stop) -> None:
    """From start to the end of draining."""
    began = time.monotonic()
    with _permanent():
        await stop.unless(app.start())
    if not stop.asked:
        log.info("service_ready", seconds=round(time.monotonic() - began, 3))
        await stop.wait()
        _exit_within(config.grace_s + CLOSE_S + EXIT_S, 1)
        await _drain(app, config.grace_s)


@contextlib.contextmanager
def _permanent() -> Iterator[None]:
    """If a node's start raises Invalid (its model is missing, for example), a restart would not help."""
    try:
        yield
    except Invalid as e:
        raise ConfigError(str(e), param=e.param) from e


async def _drain(app: App, grace_s: float) -> None:
    log.info("service_draining", grace_s=grace_s)
    began = time.monotonic()
    try:
        async with asyncio.timeout(grace_s + 0.5):  # the app should have ended by itself
            await app.drain(grace_s)
    except TimeoutError:
        log.warning("drain_timed_out", after_s=grace_s)
    log.info("service_drained", seconds=round(time.monotonic() - began, 3))


async def _close(app: App) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await app.close()
    except TimeoutError:
        log.error("close_timed_out", after_s=CLOSE_S)


async def _watch_bus(bus: NatsBus) -> None:
    await bus.failed


def _orphaned() -> None:
    log.error("parent_gone")
    os._exit(1)


def _exit_within(seconds: float, code: int) -> None:
    """From here on nothing may keep the process, be it a thread in a long computation or a lost connection."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
