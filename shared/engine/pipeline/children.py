"""Starting the stages of a group, and seeing them end."""

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
    """The process of one stage. `control` goes both ways."""

    def __init__(self, stage: int, process: subprocess.Popen[bytes], control: StageChannel[Answer]) -> None:
        self.stage = stage
        self.control = control
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Blocks while it loads. Raises EngineLost if it ends instead."""
        try:
            self.control.receive()
        except ChannelClosed as e:
            raise EngineLost(f"stage {self.stage} did not start ({self.ending()})") from e

    @property
    def followed(self) -> bool:
        """Whether it ended because another process of the group had."""
        return self._process.poll() == FOLLOWED

    def ending(self) -> str:
        """How it ended, once its links have closed."""
        try:
            return f"exit code {self._process.wait(END_S)}"
        except subprocess.TimeoutExpired:
            return "still there"

    def close(self) -> None:
        """Idempotent. Afterwards the process is no more."""
        self.control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(setups: Sequence[Setup], memory_fd: int) -> tuple[list[Child], StageChannel[Reached]]:
    """Start stages 1, 2, ...; they load at once, all together. Returns them, and the link into stage 1.

    They end with the calling thread, which must therefore live as long as they are to: see io.parent.
    """
    pairs = [socket.socketpair() for _ in setups]
    """Into each stage: (its predecessor's end, its own)."""
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
