"""Where the cluster is: what the user named, else what the launcher wrote into the run dir, else the defaults."""

from __future__ import annotations

from pathlib import Path

from shared.io.config import DEFAULT_NATS_URL
from tsukimi.local.rundir import ClusterState, RunDir

DEFAULT_HTTP = "http://127.0.0.1:8000"


def nats_url(given: str, run_dir: Path) -> str:
    state = _state(run_dir)
    return given or (state.nats_url if state is not None else DEFAULT_NATS_URL)


def http_url(given: str, run_dir: Path) -> str:
    state = _state(run_dir)
    return (given or (state.url if state is not None else DEFAULT_HTTP)).rstrip("/")


def _state(run_dir: Path) -> ClusterState | None:
    return RunDir(run_dir).read()
