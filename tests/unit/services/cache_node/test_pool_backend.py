"""The data plane's questions to the machine, and layouts over a pool's memory."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

import pytest

from services.cache_node.app import lay_out
from services.cache_node.pool_backend import MachineBackend
from shared.core.cache.config import CacheConfig
from shared.core.cache.machine import CacheEvent, CacheMachine
from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.pool_backend import ReadGrant
from shared.protocol.errors import Invalid, Refused, Unavailable
from shared.protocol.model import KVLayout

KEYS = [bytes([i]) * 16 for i in range(4)]
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32", dtype_bytes=4)


def backend() -> MachineBackend:
    machine = CacheMachine(CacheConfig(pages=8))

    def feed(event: CacheEvent) -> None:
        for command in machine.handle(event, 0.0):
            answer: Any = command
            if type(answer).__name__ in ("GrantPut", "ConfirmPut", "GrantRead"):
                asked.answer(answer)
        machine.check()

    asked = MachineBackend(feed, machine.holds)
    return asked


def test_keys_of_another_length_are_refused_by_name() -> None:
    """They could meet those of another namespace."""
    for ask in (backend().open_put, backend().open_read):
        with pytest.raises(Invalid, match="16 bytes") as e:
            ask(b"n" * 16, [*KEYS, b"n" * 16 + KEYS[0]])
        assert e.value.param == "keys"


def test_a_put_and_a_read_go_round() -> None:
    pool = backend()
    grant = pool.open_put(b"n", KEYS)
    assert grant.wanted == (0, 1, 2, 3)
    assert pool.commit_put(grant.landing, {0: 5, 1: 6}) == 2
    assert pool.commit_put(grant.landing, {0: 5}) == 0
    read = pool.open_read(b"n", KEYS)
    assert isinstance(read, ReadGrant), "nobody waits who did not ask to"
    assert (read.pages, read.checksums) == (grant.pages[:2], (5, 6))
    pool.close_read(read.lease)
    pool.close_read(read.lease)
    pool.abort_put(b"unknown")
    assert pool.open_put(b"n", KEYS).landing != grant.landing


def test_a_closed_one_grants_nothing_but_lets_puts_end() -> None:
    pool = backend()
    grant = pool.open_put(b"n", KEYS)
    pool.close()
    with pytest.raises(Unavailable):
        pool.open_put(b"n", KEYS)
    with pytest.raises(Unavailable):
        pool.open_read(b"n", KEYS)
    assert pool.commit_put(grant.landing, {0: 1}) == 1


async def opened(answer: ReadGrant | Awaitable[ReadGrant]) -> ReadGrant:
    return await answer if inspect.isawaitable(answer) else answer


async def test_a_patient_reader_gets_its_pages_in_the_commit_that_completes_them() -> None:
    """At once, so that nothing stored in between can evict them."""
    pool = backend()
    first, rest = pool.open_put(b"n", KEYS[:2]), pool.open_put(b"n", KEYS)
    reading = asyncio.ensure_future(opened(pool.open_read(b"n", KEYS, 60.0)))
    await asyncio.sleep(0)
    assert pool.commit_put(rest.landing, {2: 7, 3: 8}) == 2
    await asyncio.sleep(0)
    assert not reading.done()
    assert pool.commit_put(first.landing, {0: 5, 1: 6}) == 2
    everything = pool.open_put(b"o", [bytes([9, i]) * 8 for i in range(8)])
    assert len(everything.wanted) <= 4, "the reader's pages were given away"
    assert (await reading).checksums == (5, 6, 7, 8)


async def test_a_reader_whose_patience_ends_gets_what_is_there() -> None:
    pool = backend()
    grant = pool.open_put(b"n", KEYS[:2])
    pool.commit_put(grant.landing, {0: 5, 1: 6})
    assert (await opened(pool.open_read(b"n", KEYS, 0.01))).checksums == (5, 6)
    again = pool.open_put(b"n", KEYS)
    assert pool.commit_put(again.landing, {2: 7, 3: 8}) == 2, "a commit goes on without the reader that left"


async def test_a_reader_that_waits_is_told_that_the_pool_goes_away() -> None:
    pool = backend()
    reading = asyncio.ensure_future(opened(pool.open_read(b"n", KEYS, 60.0)))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(Unavailable):
        await reading


def test_as_many_pages_as_fit_and_none_is_refused() -> None:
    memory = Memory(3 * LAYOUT.block_bytes + 5)
    assert lay_out(memory, LAYOUT).pages == 3
    huge = KVLayout(layers=2, kv_heads=99, head_dim=128, block_tokens=16, dtype="float32", dtype_bytes=4)
    with pytest.raises(Refused, match="does not fit a pool"):
        lay_out(memory, huge)
    memory.close()
