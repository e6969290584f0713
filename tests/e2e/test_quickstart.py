"""The README's two commands, typed as they stand, and the other targets of make that the documents name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launcher_process import nothing_left
from tests.support.claims import QUICKSTART, claimed
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


def make(*words: str, run_dir: Path) -> None:
    done = subprocess.run(
        ["make", "--directory", str(README.parent), *words], env=os.environ | {"TSUKIMI_RUN_DIR": str(run_dir)},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("text", claimed(f"{QUICKSTART}::test_make_target"))
def test_make_target(text: str, tmp_path: Path) -> None:
    """A target succeeds; a program is there after `make install`."""
    target = text.removeprefix("make ")
    make(target if target != text else "install", run_dir=tmp_path / "run")
    if target == text:
        subprocess.run([README.parent / text, "--help"], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("text", claimed(f"{QUICKSTART}::test_make_down_stops_a_cluster_in_the_background"))
def test_make_down_stops_a_cluster_in_the_background(text: str, tmp_path: Path) -> None:
    run_dir, port = RunDir(tmp_path / "run"), free_port()
    small = "--kv-memory 64M --pool-memory 64M"
    make("up", "MODEL=toy", f"ARGS=--detach --port {port} {small}", run_dir=run_dir.path)
    state = run_dir.read()
    assert state is not None
    make(text.removeprefix("make "), run_dir=run_dir.path)
    assert nothing_left([p.process for p in state.processes], port)
