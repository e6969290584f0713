"""The life of a service process, with a real one (tests.support.processes.echo_service) on a real nats-server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shared.io.nats_bus import NatsBus, connect
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall
from tests.support.processes.cluster import REPOSITORY
from tests.support.processes.echo_service import SUBJECT, Echo
from tests.support.processes.nats import NatsServer
from tests.support.processes.spawn import ended, spawn, tail
from tests.support.until import until


class World:
    """A bus that listens, and the echo service's process and log."""

    def __init__(self, folder: Path, nats: NatsServer, bus: NatsBus) -> None:
        self.nats = nats
        self.bus = bus
        self.log = folder / "echo.log"
        self.infos: list[NodeInfo] = []
        self.loads: list[NodeLoad] = []
        self.left: list[NodeLeft] = []
        self.process: subprocess.Popen[bytes]

    def start(self, *flags: str) -> None:
        args = [
            sys.executable,
            "-m",
            "tests.support.processes.echo_service",
            "--nats-url",
            self.nats.url,
            *flags,
        ]
        self.process = spawn(args, log=self.log, cwd=REPOSITORY)

    async def start_ready(self, *flags: str) -> None:
        self.start(*flags)
        await until(lambda: any(info.stage == "ready" for info in self.infos))

    async def exit_code(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def events(self) -> list[str]:
        return [
            json.loads(line)["event"] for line in self.log.read_text().splitlines() if line.startswith("{")
        ]


@pytest.fixture
async def world(tmp_path: Path, nats: NatsServer) -> AsyncIterator[World]:
    bus = await connect(nats.url, name="test")
    world = World(tmp_path, nats, bus)
    await bus.subscribe_ordered(subjects.ANNOUNCE, NodeInfo, world.infos.append)
    await bus.subscribe_ordered(subjects.heartbeats_of("cache"), NodeLoad, world.loads.append)
    await bus.subscribe_ordered(subjects.LEAVE, NodeLeft, world.left.append)
    yield world
    if hasattr(world, "process"):
        world.process.kill()
        world.process.wait()
    await bus.close()


async def test_it_announces_every_stage_beats_and_leaves(world: World) -> None:
    await world.start_ready("--node", "cache-7", "--heartbeat-s", "0.05")
    assert [info.stage for info in world.infos] == ["starting", "ready"]
    await until(lambda: len(world.loads) > 5)
    assert [load.seq for load in world.loads] == list(range(1, len(world.loads) + 1))
    world.process.terminate()
    assert await world.exit_code() == 0
    (life,) = {(info.ref.node, info.ref.incarnation) for info in world.infos}
    assert life[0] == "cache-7"
    assert {(load.node, load.incarnation) for load in world.loads} == {life}
    await until(lambda: world.left == [NodeLeft(*life)])


async def test_a_roll_call_is_answered(world: World) -> None:
    await world.start_ready()
    world.infos.clear()
    await world.bus.publish(subjects.ROLL_CALL, RollCall("me"))
    await until(lambda: [info.stage for info in world.infos] == ["ready"])


async def test_changes_are_told_soon_but_coalesced(world: World) -> None:
    await world.start_ready("--heartbeat-s", "3600")
    await until(lambda: world.loads and world.loads[-1].stage == "ready")
    before = len(world.loads)
    asked = [world.bus.request(SUBJECT, Echo(str(n), after_s=0.3), Echo, 10.0) for n in range(200)]
    answers = asyncio.gather(*asked)
    await until(lambda: world.loads[-1].running == 200)
    assert len(world.loads) - before < 100
    await answers


async def test_it_announces_itself_again_after_an_outage(world: World) -> None:
    await world.start_ready("--heartbeat-s", "3600")
    await asyncio.to_thread(world.nats.kill)
    await until(lambda: not world.bus.connected and "bus_lost" in world.events())
    world.infos.clear()
    world.loads.clear()
    world.nats.start()
    await until(lambda: world.bus.connected and "bus_found" in world.events())
    if not world.infos:  # it was back before us, and nobody heard it
        await world.bus.publish(subjects.ROLL_CALL, RollCall())
    await until(lambda: world.infos and world.loads)
    assert world.infos[-1].stage == "ready"
    assert await world.bus.request(SUBJECT, Echo("again"), Echo, 5.0) == Echo("again")


async def test_it_waits_for_a_server_that_starts_later_and_ends_at_once_if_told_to(
    world: World,
) -> None:
    await asyncio.to_thread(world.nats.stop)
    world.start()
    await until(lambda: world.log.exists() and "waiting_for_nats" in world.events())
    world.process.terminate()
    assert await world.exit_code() == 0
    world.start()
    world.nats.start()
    await until(lambda: world.bus.connected)
    await world.bus.publish(subjects.ROLL_CALL, RollCall())
    await until(lambda: any(info.stage == "ready" for info in world.infos))


async def test_sigterm_finishes_what_runs(world: World) -> None:
    await world.start_ready()
    asked = asyncio.ensure_future(world.bus.request(SUBJECT, Echo("slow", after_s=0.5), Echo, 30.0))
    await until(lambda: world.loads and world.loads[-1].running == 1)
    world.process.terminate()
    assert await asked == Echo("slow", after_s=0.5)
    assert await world.exit_code() == 0
    assert "draining" in [info.stage for info in world.infos]


async def test_the_grace_time_bounds_the_drain(world: World) -> None:
    await world.start_ready("--grace-s", "0.2")
    await world.bus.publish(SUBJECT, Echo("endless", after_s=3600))
    await until(lambda: world.loads and world.loads[-1].running == 1)
    world.process.terminate()
    assert await world.exit_code() == 0
    assert "drain_timed_out" in world.events()


async def test_a_thread_that_does_not_end_keeps_no_process(world: World) -> None:
    world.start("--fail", "thread")
    await until(lambda: any(info.stage == "loading" for info in world.infos))
    world.process.terminate()
    assert await world.exit_code() == 0


async def test_a_second_signal_ends_it_now(world: World) -> None:
    await world.start_ready("--grace-s", "3600")
    await world.bus.publish(SUBJECT, Echo("endless", after_s=3600))
    await until(lambda: world.loads and world.loads[-1].running == 1)
    world.process.send_signal(signal.SIGINT)
    await until(lambda: world.infos[-1].stage == "draining")
    world.process.send_signal(signal.SIGINT)
    assert await world.exit_code() != 0


async def test_a_bug_ends_the_process_with_1_and_the_node_leaves(world: World) -> None:
    await world.start_ready("--fail", "later")
    assert await world.exit_code() == 1
    assert "ZeroDivisionError: a bug" in tail(world.log)
    await until(lambda: len(world.left) == 1)


async def test_a_failed_start_ends_the_process_with_1(world: World) -> None:
    world.start("--fail", "start")
    assert await world.exit_code() == 1
    assert "no such device" in tail(world.log)


@pytest.mark.parametrize("flags", [["--fail", "config"], ["--heartbeat-s", "0"], ["--heartbeet-s", "1"]])
async def test_a_configuration_that_cannot_work_has_an_exit_code_of_its_own(
    world: World, flags: list[str]
) -> None:
    world.start(*flags)
    assert await world.exit_code() == 78


async def test_help_needs_no_server(world: World) -> None:
    world.start("--help")
    assert await world.exit_code() == 0
    text = world.log.read_text()
    assert "--heartbeat-s  float, default 0.5" in text
    assert "Seconds between heartbeats." in text


async def test_the_first_line_is_the_configuration_without_secrets(world: World) -> None:
    await world.start_ready("--api-key", "hush")
    first = json.loads(world.log.read_text().splitlines()[0])
    assert first["event"] == "service_configured"
    assert first["config"]["nats_url"] == world.nats.url
    assert first["config"]["api_key"] == "***"
    assert "hush" not in world.log.read_text()


async def test_also_while_it_waits_for_nats(world: World) -> None:
    await asyncio.to_thread(world.nats.stop)
    parent = spawn([sys.executable, "-c", "import time; time.sleep(3600)"], log=world.log)
    world.start("--parent-pid", str(parent.pid))
    await until(lambda: "waiting_for_nats" in world.events())
    parent.kill()
    parent.wait()
    assert await world.exit_code() == 1


@pytest.mark.parametrize("through_shell", [False, True])
async def test_it_ends_with_the_process_it_was_started_for(world: World, through_shell: bool) -> None:
    """The parent, killed with -9, starts it itself or through a shell that outlives it."""
    script = textwrap.dedent(
        f"""
        import os, subprocess, sys, time
        args = [sys.executable, "-m", "tests.support.processes.echo_service", "--nats-url", "{world.nats.url}",
                "--parent-pid", str(os.getpid())]
        if {through_shell}:
            args = ["sh", "-c", '"$@"; sleep 60', "sh", *args]
        subprocess.Popen(args)
        time.sleep(3600)
        """
    )
    parent = spawn([sys.executable, "-c", script], log=world.log, cwd=REPOSITORY)
    try:
        await until(lambda: any(info.stage == "ready" for info in world.infos))
        family = psutil.Process(parent.pid).children(recursive=True)
        (service,) = [p for p in family if p.cmdline()[-1] == str(parent.pid) and p.name() != "sh"]
        parent.kill()
        parent.wait()
        await until(lambda: ended(service))
    finally:
        for process in family:
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)
