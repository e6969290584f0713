"""Processes by identity. A pid alone may have been reused; a pid with its start time identifies one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

SHIM = Path(__file__).with_name("shim.py")


class ProcessId(Struct, frozen=True):
    pid: int
    started: int
    """Clock ticks from boot to its start (field 22 of /proc/PID/stat)."""


def identify(pid: int) -> ProcessId | None:
    """The process now behind `pid`; None if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else ProcessId(pid, int(fields[19]))


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def send(process: ProcessId, signal_: signal.Signals) -> None:
    """Signal it if it is still that process; else do nothing."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_)


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Those still alive after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = [p for p in processes if is_alive(p)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [p for p in left if is_alive(p)]
    return left


def kill_all(processes: Iterable[ProcessId], timeout_s: float = 5.0) -> list[ProcessId]:
    """SIGKILL each and wait. Returns those that did not end."""
    targets = list(processes)
    for process in targets:
        send(process, signal.SIGKILL)
    return wait_gone(targets, timeout_s)


async def spawn(argv: tuple[str, ...], log: Path) -> asyncio.subprocess.Process:
    """Start a process that dies with this one, does not get the terminal's Ctrl-C, and appends to `log`.

    Call it in the main thread: the death signal comes when the calling thread ends."""
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(SHIM), str(os.getpid()), *argv,
            stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
