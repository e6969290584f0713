from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.processes.spawn import wait_until
from tsukimi.local.processes import SHIM, ProcessId, identify, is_alive, kill_all, send, spawn


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_process_is_known_by_pid_and_start() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert is_alive(me)
    assert not is_alive(ProcessId(me.pid, me.started + 1))


def test_a_recycled_pid_is_never_signalled() -> None:
    child = sleeper()
    try:
        known = identify(child.pid)
        assert known is not None
        send(ProcessId(known.pid, known.started - 1), signal.SIGKILL)
        assert kill_all([ProcessId(known.pid, known.started - 1)]) == []
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_zombie_is_not_alive() -> None:
    child = sleeper()
    known = identify(child.pid)
    assert known is not None
    child.kill()
    wait_until(lambda: not is_alive(known), 5.0, "the zombie counts as gone")
    assert identify(child.pid) is None
    child.wait()


def test_kill_all_waits_until_they_are_gone() -> None:
    child = sleeper()
    known = identify(child.pid)
    assert known is not None
    assert kill_all([known]) == []
    assert not is_alive(known)
    child.wait()


async def test_output_goes_to_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("before\n")
    process = await spawn((sys.executable, "-c", "print('after')"), log)
    assert await process.wait() == 0
    assert log.read_text() == "before\nafter\n"


async def test_the_terminals_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    process = await spawn((sys.executable, "-c", "import time; time.sleep(60)"), tmp_path / "x.log")
    try:
        assert os.getpgid(process.pid) != os.getpgid(0)
    finally:
        process.kill()
        await process.wait()


PARENT = """
import subprocess, sys, os, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), *sleep])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_parent_takes_its_child_along() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(SHIM)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    wait_until(
        lambda: b"time.sleep" in Path(f"/proc/{child_pid}/cmdline").read_bytes(), 5.0, "the child runs"
    )
    child = identify(child_pid)
    assert child is not None
    time.sleep(0.1)
    assert is_alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(child), 5.0, "the child is gone")


def test_a_child_that_begins_after_its_parents_end_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, str(SHIM), "1", sys.executable, "-c", "print('ran')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ran" not in done.stdout
    assert "was gone before" in done.stderr


async def test_death_signals_are_armed_through_spawn(tmp_path: Path) -> None:
    process = await spawn((sys.executable, "-c", "print(__import__('os').getppid())"), tmp_path / "x.log")
    assert await asyncio.wait_for(process.wait(), 20) == 0
    assert (tmp_path / "x.log").read_text().strip() == str(os.getpid())
