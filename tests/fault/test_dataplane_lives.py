"""Peers that die, hang, come back under the same name, or send bytes that are not the protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from pathlib import Path

import msgspec
import pytest

from shared.dataplane.api import LandingCommit
from shared.dataplane.transports.base import Timeouts
from shared.dataplane.wire.frames import Write
from shared.dataplane.wire.framing import encode
from shared.protocol.errors import Unavailable
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, DictPool, eventually, site
from tests.support.processes.dataplane_peer import LANDING, PROMPT_KEYS, PeerProcess

LAYERS = range(LAYOUT.layers)
SHORT = Timeouts(connect_s=2.0, stall_s=0.5)


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_kill_9_of_a_writer_fails_its_landing(transport: str, tmp_path: Path) -> None:
    told: asyncio.Future[LandingCommit] = asyncio.get_running_loop().create_future()
    async with site("d", transport) as far:
        far.endpoint.open_landing(LANDING, range(16), told.set_result)
        with PeerProcess(tmp_path, "write", "p", transport, far.endpoint.ref) as writer:
            await eventually(lambda: far.endpoint.counters()["slices_received"] > 100)
            writer.kill()
            commit = await asyncio.wait_for(told, 10)
        assert not commit.ok
        assert "the writer was lost" in commit.error
        mine = far.fill(0)
        await far.endpoint.close_landing(LANDING)
        assert far.read(0) == mine


async def test_kill_9_of_a_receiver_ends_commit_and_abort(transport: str, tmp_path: Path) -> None:
    async with site("p", transport) as near:
        with PeerProcess(tmp_path, "landing", "d", transport) as receiver:
            streams = [near.endpoint.open_write(receiver.ref, LANDING) for _ in range(2)]
            for layer in LAYERS:
                streams[0].write(layer, [(0, 0)])
            await eventually(lambda: near.endpoint.counters()["slices_sent"] == LAYOUT.layers)
            receiver.kill()
            reply = await asyncio.wait_for(streams[0].commit(1), 10)
            assert not reply.ok
            await asyncio.wait_for(streams[1].abort(), 10)


async def test_kill_9_of_a_pool_is_a_miss(transport: str, tmp_path: Path) -> None:
    async with site("q", transport) as near:
        with PeerProcess(tmp_path, "pool", "cache", transport) as pool:
            with PeerProcess(tmp_path, "put", "p", transport, pool.ref) as writer:
                assert writer.line("stored") == {"stored": len(PROMPT_KEYS)}
            good = await near.endpoint.fetch(pool.ref, NAMESPACE, PROMPT_KEYS, range(len(PROMPT_KEYS)))
            assert good.blocks == len(PROMPT_KEYS)
            pool.kill()
            gone = await near.endpoint.fetch(pool.ref, NAMESPACE, PROMPT_KEYS, range(len(PROMPT_KEYS)))
            assert gone.blocks == 0
            assert gone.error


async def test_keys_are_equal_in_processes_with_other_hash_seeds(transport: str, tmp_path: Path) -> None:
    """Blocks written under one PYTHONHASHSEED are found under others."""
    async with site("cache", transport, order="page", pages=64) as cache, site("q", transport) as near:
        cache.endpoint.serve_pool(DictPool(64))
        for seed, stored in (("1", len(PROMPT_KEYS)), ("2", 0)):
            target = cache.endpoint.ref
            with PeerProcess(tmp_path, "put", f"p{seed}", transport, target, PYTHONHASHSEED=seed) as writer:
                said = await asyncio.to_thread(
                    writer.line, "stored"
                )  # in a thread, because the pool runs on this loop
                assert said == {"stored": stored}
        result = await near.endpoint.fetch(
            cache.endpoint.ref, NAMESPACE, PROMPT_KEYS, range(len(PROMPT_KEYS))
        )
        assert result.blocks == len(PROMPT_KEYS)


async def test_another_life_under_the_same_name_is_never_taken_for_the_old_one(
    transport: str, tmp_path: Path
) -> None:
    async with site("p", transport) as near:
        with PeerProcess(tmp_path, "pool", "cache", transport) as old:
            with PeerProcess(tmp_path, "put", "w", transport, old.ref) as writer:
                writer.line("stored")
            assert (await near.endpoint.fetch(old.ref, NAMESPACE, PROMPT_KEYS[:1], [0])).blocks == 1
            old.kill()
            with PeerProcess(tmp_path, "pool", "cache", transport) as new:
                stale = msgspec.structs.replace(new.ref, incarnation=old.ref.incarnation)
                fetched = await near.endpoint.fetch(stale, NAMESPACE, PROMPT_KEYS[:1], [0])
                assert fetched.blocks == 0
                assert old.ref.incarnation in fetched.error
                assert new.ref.incarnation in fetched.error
                reply = await near.endpoint.open_write(stale, LANDING).commit(0)
                assert new.ref.incarnation in reply.error
                with pytest.raises(Unavailable, match="this is life"):
                    await near.endpoint.open_put(stale, NAMESPACE, PROMPT_KEYS[:1])
                fresh = await near.endpoint.fetch(new.ref, NAMESPACE, PROMPT_KEYS[:1], [0])
                assert fresh.error == "the pool holds none of it"
                near.endpoint.forget("cache", new.ref.incarnation)
                assert near.endpoint.transports() == {"cache": transport}


async def test_forgetting_a_life_ends_what_it_still_writes(transport: str, tmp_path: Path) -> None:
    told: asyncio.Future[LandingCommit] = asyncio.get_running_loop().create_future()
    async with site("d", transport) as far:
        far.endpoint.open_landing(LANDING, range(16), told.set_result)
        with PeerProcess(tmp_path, "write", "p", transport, far.endpoint.ref) as writer:
            await eventually(lambda: far.endpoint.counters()["slices_received"] > 0)
            far.endpoint.forget("somebody else")
            far.endpoint.forget("p", writer.ref.incarnation)
            await asyncio.sleep(0.05)
            assert not told.done()
            far.endpoint.forget("p", "a newer life")
            assert "that life of the peer is over" in (await asyncio.wait_for(told, 10)).error


async def test_a_peer_that_hangs_is_given_up(transport: str, tmp_path: Path) -> None:
    async with site("p", transport, timeouts=SHORT) as near:
        with PeerProcess(tmp_path, "landing", "d", transport) as receiver:
            stream = near.endpoint.open_write(receiver.ref, LANDING)
            stream.write(0, [(0, 0)])
            await eventually(lambda: near.endpoint.counters()["slices_sent"] == 1)
            os.kill(receiver.process.pid, signal.SIGSTOP)
            await eventually(lambda: stopped(receiver.process.pid), "every thread of it has stopped")
            reply = await asyncio.wait_for(stream.commit(1), 10)
            assert (reply.ok, reply.error) == (False, "no answer within 0.5 s")
            fetched = await near.endpoint.fetch(receiver.ref, NAMESPACE, PROMPT_KEYS[:1], [0])
            assert fetched.blocks == 0


def stopped(pid: int) -> bool:
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"TKMD",
        encode(Write(1, 0, [0], [0]), 100)[:30],
        os.urandom(4096),
    ],
    ids=["nothing", "http", "half a header", "half a frame", "noise"],
)
async def test_strangers_do_no_harm(said: bytes) -> None:
    """Each stranger sends its bytes and closes or resets the connection. Other peers are served as before."""
    async with site("d", "tcp") as far, site("p", "tcp") as near:
        host, _, port = far.endpoint.ref.tcp.rpartition(":")
        for hang_up in (socket.socket.close, reset):
            for _ in range(5):
                stranger = socket.create_connection((host, int(port)))
                stranger.sendall(said)
                hang_up(stranger)
        told: list[LandingCommit] = []
        far.endpoint.open_landing(LANDING, [0], told.append)
        stream = near.endpoint.open_write(far.endpoint.ref, LANDING)
        for layer in LAYERS:
            stream.write(layer, [(0, 0)])
        assert (await stream.commit(1)).ok


async def test_a_receiver_that_resets_in_the_middle_of_a_payload_is_an_answer() -> None:
    async with site("p", "tcp") as near, site("d", "tcp") as real:
        listener = socket.create_server(("127.0.0.1", 0))
        ref = msgspec.structs.replace(real.endpoint.ref, tcp=f"127.0.0.1:{listener.getsockname()[1]}")
        stream = near.endpoint.open_write(ref, LANDING)
        stream.write(0, [(0, 0)])
        sock, _ = await asyncio.to_thread(listener.accept)
        await asyncio.to_thread(sock.recv, 10)
        reset(sock)
        reply = await asyncio.wait_for(stream.commit(1), 10)
        assert not reply.ok
        listener.close()
