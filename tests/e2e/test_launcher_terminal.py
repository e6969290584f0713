"""The launcher in a real terminal: a table that moves, and a Ctrl-C that goes to everybody in the foreground."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
from pathlib import Path

from tests.e2e.launcher_process import STAND_INS, nothing_left
from tests.support.processes.launched import free_port
from tests.support.processes.spawn import wait_until
from tsukimi.local.rundir import RunDir


def test_ctrl_c_in_a_terminal_stops_all_in_order(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    arguments = [
        "up",
        "--model",
        "toy",
        "--run-dir",
        str(run_dir.path),
        "--port",
        str(free_port()),
        *STAND_INS,
    ]
    arguments += ["--kv-memory", "1M", "--pool-memory", "1M"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-m", "tsukimi", *arguments])
    screen = bytearray()
    os.set_blocking(terminal, False)
    try:
        wait_until(lambda: b"Ready: " in _read(terminal, screen), 30.0, "the cluster is ready")
        state = run_dir.read()
        assert state is not None
        assert {p.name for p in state.processes} >= {"nats", "gateway-0"}
        os.write(terminal, b"\x03")
        wait_until(lambda: b"stopping (SIGINT)" in _read(terminal, screen), 10.0, "it heard Ctrl-C")
        status = 0

        def ended() -> bool:
            nonlocal status
            _read(terminal, screen)
            done, status = os.waitpid(pid, os.WNOHANG)
            return done == pid

        wait_until(ended, 30.0, "it has ended")
        pid = 0
        assert os.waitstatus_to_exitcode(status) == 0
        assert nothing_left([p.process for p in state.processes])
        text = screen.decode(errors="replace")
        assert "conductor-0" in text
        assert "Traceback" not in text
        assert "was killed" not in text
    finally:
        os.close(terminal)
        if pid:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def _read(terminal: int, screen: bytearray) -> bytearray:
    with contextlib.suppress(OSError):  # nothing new, or the other end is closed
        screen += os.read(terminal, 1 << 16)
    return screen
