"""The folder of one local cluster: who runs there, where its logs are. A file lock allows one cluster in a folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO, Literal

import msgspec
from msgspec import Struct

from tsukimi.errors import ToolError
from tsukimi.local.processes import ProcessId, kill_all

ClusterPhase = Literal["starting", "ready", "stopping", "failed"]


class ProcessState(Struct, frozen=True):
    name: str
    process: ProcessId
    log: str


class ClusterState(Struct, frozen=True):
    """What a launcher writes down for `status`, `down`, `logs` and the next `up`."""

    launcher: ProcessId
    phase: ClusterPhase
    nats_url: str
    url: str
    model: str
    processes: tuple[ProcessState, ...] = ()
    error: str = ""


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self._state = path / "cluster.json"
        self._lock: IO[bytes] | None = None

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @property
    def launcher_log(self) -> Path:
        return self.path / "launcher.log"

    # -- the launcher's side -----------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Become the folder's only launcher and clear what a crashed one left. Raises ToolError if another is running."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ToolError(self.already_running()) from None
        self._lock = lock
        self.clear_leftovers()
        self._rotate_logs()

    def write(self, state: ClusterState) -> None:
        """Atomic: a reader sees the old state or the new one."""
        draft = self._state.with_suffix(".tmp")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        draft.replace(self._state)

    def release(self, *, keep_state: bool) -> None:
        """Idempotent. The state of a failed cluster is kept, because it says why."""
        if not keep_state:
            self._state.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- everybody's side --------------------------------------------------------------------------------------------

    def read(self) -> ClusterState | None:
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=ClusterState)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:
            return None  # written by another version: its processes are unknown

    def is_locked(self) -> bool:
        """Whether a launcher runs here."""
        try:
            with (self.path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def clear_leftovers(self) -> None:
        """End the processes that a crashed launcher left, and forget its state. Raises ToolError if one stays."""
        state = self.read()
        if state is not None:
            left = kill_all(p.process for p in state.processes)
            if left:
                pids = ", ".join(str(p.pid) for p in left)
                raise ToolError(
                    f"processes of an earlier cluster do not end (pids {pids}); stop them and try again."
                )
        self.forget()

    def forget(self) -> None:
        """Delete the state of a cluster that is gone."""
        self._state.unlink(missing_ok=True)

    def already_running(self) -> str:
        state = self.read()
        where = f" at {state.url} (launcher pid {state.launcher.pid})" if state is not None else ""
        folder = display_path(self.path)
        return f"a cluster already runs in {folder}{where}. Stop it with `tsukimi down`, or give --run-dir."

    def _rotate_logs(self) -> None:
        old = self.path / "logs.previous"
        shutil.rmtree(old, ignore_errors=True)
        if self.logs.exists():
            self.logs.rename(old)
        self.logs.mkdir()


def display_path(path: Path) -> str:
    """The path relative to the current folder if it lies in it, else as it is."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log. Does not read the whole of a long one."""
    try:
        with log.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 400 * lines))
            return f.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
