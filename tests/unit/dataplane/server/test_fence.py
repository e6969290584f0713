"""The fence: after it is closed and quiet, nobody writes."""

from __future__ import annotations

import asyncio
import threading

from shared.dataplane.server.fence import Fence


async def test_an_unused_fence_is_quiet_once_closed() -> None:
    fence = Fence()
    assert fence.open()
    assert not await fence.wait_quiet(0)
    fence.close()
    fence.close()
    assert await fence.wait_quiet(0)
    with fence.writing() as entered:
        assert not entered


async def test_it_is_not_quiet_while_a_writer_is_inside() -> None:
    fence, inside, leave = Fence(), threading.Event(), threading.Event()

    def write() -> None:
        with fence.writing() as entered:
            assert entered
            inside.set()
            leave.wait(10)
            assert not fence.open()

    thread = threading.Thread(target=write)
    thread.start()
    await asyncio.to_thread(inside.wait, 10)
    fence.close()
    assert not await fence.wait_quiet(0.02)
    assert not fence.quiet.done()
    leave.set()
    assert await fence.wait_quiet()
    thread.join()


async def test_one_impatient_waiter_does_not_spoil_it_for_others() -> None:
    fence = Fence()
    with fence.writing():
        fence.close()
        patient = asyncio.create_task(fence.wait_quiet())
        impatient = asyncio.create_task(fence.wait_quiet())
        await asyncio.sleep(0)
        impatient.cancel()
        assert not await fence.wait_quiet(0.01)
    assert await patient


def test_a_writer_that_fails_leaves_too() -> None:
    fence = Fence()
    try:
        with fence.writing():
            fence.close()
            raise RuntimeError
    except RuntimeError:
        pass
    assert fence.quiet.done()
