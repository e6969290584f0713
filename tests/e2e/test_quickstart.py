"""The README's two commands, typed as they stand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launcher_process import nothing_left
from tests.support.processes.launched import free_port
from tests.support.processes.spawn import spawn, tail, wait_until
from tests.support.readme import README, curl_line
from tsukimi.local.rundir import RunDir

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here"),
]


def test_make_up_then_curl_then_ctrl_c(tmp_path: Path) -> None:
    run_dir, port, log = RunDir(tmp_path / "run"), free_port(), tmp_path / "make.log"
    before = set(os.listdir("/dev/shm"))
    arguments = f"ARGS=--port {port} --run-dir {run_dir.path}"
    make = spawn(["make", "--directory", str(README.parent), "up", arguments], log=log)
    try:
        wait_until(lambda: "Ready: " in tail(log, 100) or make.poll() is not None, 240, "make up is ready")
        assert make.poll() is None, tail(log, 100)
        state = run_dir.read()
        assert state is not None
        answer = subprocess.run(
            ["bash", "-c", curl_line(f"http://127.0.0.1:{port}")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        assert "Paris" in answer.stdout
        assert answer.stdout.rstrip().endswith("data: [DONE]")
    finally:
        down = RunDir(run_dir.path).read()
        if down is not None:
            os.kill(down.launcher.pid, signal.SIGINT)
        make.wait(60)
    assert nothing_left([p.process for p in state.processes], port)
    assert set(os.listdir("/dev/shm")) <= before
