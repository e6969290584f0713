"""`tsukimi down`: ends all processes, whatever state the launcher is in."""

from __future__ import annotations

import signal

from tsukimi.errors import ToolError
from tsukimi.local.processes import is_alive, kill_all, send, wait_gone
from tsukimi.local.rundir import RunDir, display_path

PATIENCE_S = 45.0
"""Seconds: more than three waves of stopping take if each uses all of its grace."""


def down(run_dir: RunDir, *, kill: bool = False) -> str:
    """Stop the folder's cluster. Returns what was done, for people. Raises ToolError if a process stays."""
    state = run_dir.read()
    if state is None:
        if run_dir.is_locked():
            raise ToolError(
                f"a launcher in {display_path(run_dir.path)} is just starting or stopping; try again."
            )
        return f"No cluster runs in {display_path(run_dir.path)}."
    was_alive = is_alive(state.launcher)
    if was_alive:
        send(state.launcher, signal.SIGKILL if kill else signal.SIGTERM)
        if wait_gone([state.launcher], PATIENCE_S):
            kill_all([state.launcher])
    state = run_dir.read() or state  # what it had started before it ended
    left = [p.process for p in state.processes if is_alive(p.process)]
    if kill_all(left):
        raise ToolError("some processes do not end: " + ", ".join(str(p.pid) for p in left))
    run_dir.forget()
    if was_alive:
        return f"Stopped the cluster in {display_path(run_dir.path)}."
    return f"The launcher in {display_path(run_dir.path)} was gone already; cleaned up."
