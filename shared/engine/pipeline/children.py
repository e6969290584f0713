"""Starts the child processes of a group, and reports how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from shared.engine.api import EngineLost
from shared.engine.pipeline.channel import ChannelClosed, StageChannel
from shared.engine.pipeline.messages import FOLLOWED, Answer, Reached, Setup

END_S = 2.0


class Child:
    """The process of one stage. `control` is its link to the node, used in both directions."""

    def __init__(self, stage: int, process: subprocess.Popen[bytes], control: StageChannel[Answer]) -> None:
        self.stage = stage
        self.control = control
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until it has loaded. Raises EngineLost if it ends before that."""
        try:
            self.control.receive()
        except ChannelClosed as e:
            raise EngineLost(f"stage {self.stage} did not start ({self.ending()})") from e

    @property
    def followed(self) -> bool:
        """Whether it ended because another process of the group had ended."""
        return self._process.poll() == FOLLOWED

    def ending(self) -> str:
        """How it ended, for messages. Call this once its links have closed; waits up to END_S for the process to end."""
        try:
            return f"exit code {self._process.wait(END_S)}"
        except subprocess.TimeoutExpired:
            return "still there"

    def close(self) -> None:
        """Idempotent. Afterwards the process has ended; it is killed if it does not end within END_S."""
        self.control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(setups: Sequence[Setup], memory_fd: int) -> tuple[list[Child], StageChannel[Reached]]:
    """Start stages 1, 2, ...; they load in parallel. Returns their processes, and the link to stage 1.

    The stages end when the calling thread ends, so it must live as long as they are needed: see io.parent.
    """
    pairs = [socket.socketpair() for _ in setups]
    """The link into each stage: (its predecessor's end, its own end)."""
    children: list[Child] = []
    try:
        for i, setup in enumerate(setups):
            onward = pairs[i + 1][0] if i + 1 < len(pairs) else None
            children.append(_child(i + 1, setup, memory_fd, pairs[i][1], onward))
    except BaseException:
        for child in children:
            child.close()
        pairs[0][0].close()
        raise
    finally:
        for i, (before, own) in enumerate(pairs):
            own.close()
            if i:
                before.close()
    return children, StageChannel(pairs[0][0], Reached)


def _child(
    stage: int, setup: Setup, memory_fd: int, previous: socket.socket, onward: socket.socket | None
) -> Child:
    ours, theirs = socket.socketpair()
    fds = {"memory": memory_fd, "control": theirs.fileno(), "previous": previous.fileno()}
    if onward is not None:
        fds["next"] = onward.fileno()
    flags = [word for name, fd in fds.items() for word in (f"--{name}-fd", str(fd))]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "shared.engine.pipeline.stage", "--parent-pid", str(os.getpid()), *flags],
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(fds.values()),
        )
    child: Child = Child(stage, process, StageChannel(ours, Answer))
    child.control.send(setup)
    return child
