"""No orphans: a process started for another one ends with it, however the other ended."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (on Linux; elsewhere only watch_parent helps).

    The kernel watches the parent's *thread*: start services from a thread that lives as long as they do.
    """
    if os.getppid() != parent_pid:
        return  # started through another program; watch_parent handles that
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent ended between the two calls
            os._exit(1)


async def watch_parent(parent_pid: int, gone: Callable[[], None]) -> None:
    """Call `gone` once the process is gone. Works for any process of this user, a parent or not."""
    try:
        fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        gone()
        return
    except (AttributeError, OSError):  # no pidfds here
        await _poll(parent_pid)
        gone()
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
        gone()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _poll(parent_pid: int) -> None:
    while True:
        try:
            os.kill(parent_pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.5)
