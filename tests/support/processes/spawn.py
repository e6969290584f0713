"""Child processes of tests. They die with the test process, however it ends."""

from __future__ import annotations

import ctypes
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    args: Sequence[str], *, log: Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child and append its output to `log`. Call from the main thread only: the child dies with its thread."""
    assert threading.current_thread() is threading.main_thread()
    with log.open("ab") as out:
        return subprocess.Popen(
            args,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            preexec_fn=_die_with_parent,
        )


def wait_until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until `holds()`; AssertionError after `timeout_s`. For state of other processes, which send no events."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def ended(process: psutil.Process) -> bool:
    """Whether it has ended. It may be gone, or a zombie that its parent has not reaped yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    """A port that nobody listens on. It is outside the range that the system uses for outgoing connections, so it stays
    free while its owner restarts."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def program(name: str) -> str:
    """Path of an executable installed beside this Python or on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed"
    return found


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
