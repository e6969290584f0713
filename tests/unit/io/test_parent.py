from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from shared.io.parent import watch_parent


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])


def no_pidfd(pid: int) -> int:
    raise OSError("not on this system")


@pytest.mark.parametrize("pidfd", [True, False])
async def test_the_end_of_a_process_is_noticed(pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", no_pidfd, raising=False)
    parent = sleeper()
    gone = asyncio.Event()
    watching = asyncio.ensure_future(watch_parent(parent.pid, gone.set))
    try:
        await asyncio.sleep(0.05)
        assert not gone.is_set()
    finally:
        parent.kill()
        parent.wait()
    await asyncio.wait_for(watching, 20.0)
    assert gone.is_set()


async def test_a_process_that_had_ended_before_is_gone_at_once() -> None:
    parent = sleeper()
    parent.kill()
    parent.wait()
    gone = asyncio.Event()
    await asyncio.wait_for(watch_parent(parent.pid, gone.set), 20.0)
    assert gone.is_set()
