from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tsukimi.errors import ToolError
from tsukimi.local.processes import ProcessId, identify, is_alive
from tsukimi.local.rundir import ClusterState, ProcessState, RunDir, tail
from tsukimi.local.stop import down


def state(*processes: ProcessState, launcher: ProcessId | None = None) -> ClusterState:
    return ClusterState(
        launcher=launcher or ProcessId(os.getpid(), 1), phase="ready", nats_url="nats://127.0.0.1:14222",
        url="http://127.0.0.1:8000", model="toy", processes=processes,
    )  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.read() is None
    written = state(ProcessState("nats", ProcessId(1, 2), "nats.log"))
    run_dir.write(written)
    assert run_dir.read() == written


def test_a_state_of_another_version_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"version": 0}')
    assert RunDir(tmp_path).read() is None


def test_only_one_cluster_a_folder(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    first.claim()
    first.write(state())
    assert second.is_locked()
    with pytest.raises(ToolError, match=r"already runs in .* at http://127.0.0.1:8000"):
        second.claim()
    first.release(keep_state=False)
    assert not second.is_locked()
    second.claim()
    second.release(keep_state=False)


def test_the_previous_clusters_logs_are_kept_once(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        run_dir = RunDir(tmp_path)
        run_dir.claim()
        run_dir.log_of("nats").write_text(text)
        run_dir.release(keep_state=False)
    assert (tmp_path / "logs" / "nats.log").read_text() == "third"
    assert (tmp_path / "logs.previous" / "nats.log").read_text() == "second"


def test_a_crashed_launchers_processes_are_ended_by_the_next_claim(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    known = identify(child.pid)
    assert known is not None
    run_dir = RunDir(tmp_path)
    stranger = ProcessId(os.getpid(), 1)  # this test's pid, given to somebody else long ago
    run_dir.write(state(ProcessState("decode-0", known, ""), ProcessState("nats", stranger, "")))
    run_dir.claim()
    assert not is_alive(known)
    child.wait()
    assert run_dir.read() is None
    run_dir.release(keep_state=False)


def test_down_without_a_cluster_says_so(tmp_path: Path) -> None:
    assert "No cluster runs" in down(RunDir(tmp_path))


def test_down_after_a_crash_cleans_up(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    known = identify(child.pid)
    assert known is not None
    run_dir = RunDir(tmp_path)
    run_dir.write(state(ProcessState("decode-0", known, "")))
    assert "gone already" in down(run_dir)
    assert not is_alive(known)
    child.wait()
    assert run_dir.read() is None


def test_tail_is_the_end(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert tail(log, 2) == ["line 9998", "line 9999"]
    assert tail(tmp_path / "none.log", 2) == []
