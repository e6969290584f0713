"""How fast blocks move between two processes of this machine: python -m shared.dataplane.bench [--json FILE]

One run compares TCP, shared memory and plain memcpy, so that a noisy machine slows all of them alike. Checksums are
computed and verified as in service: this is the whole way of a block, not a socket's rate.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.dataplane.api import LandingCommit
from shared.dataplane.endpoint import Endpoint, EndpointOptions, endpoint
from shared.dataplane.memory.arena import Arena
from shared.dataplane.pool_backend import PutGrant, ReadGrant
from shared.dataplane.wire.checksums import block_checksum, slice_checksums
from shared.dataplane.wire.hello import Identity
from shared.protocol.ids import BlockKey, LandingId, NodeRef, new_incarnation
from shared.protocol.model import KVLayout

NAMESPACE = b"bench"
LAYOUTS = {
    "smollm2-135m bf16": KVLayout(
        layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16", dtype_bytes=2
    ),
    "llama-8b bf16": KVLayout(
        layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16", dtype_bytes=2
    ),
}
WAYS = {"tcp": "", "shm": "bench"}
"""Transport -> host identity that makes both ends choose it."""


class Row(Struct, frozen=True):
    layout: str
    way: str
    what: str
    gigabytes_per_s: float
    cpu_s_per_gigabyte: float
    """Of the process that writes or fetches."""


class WholePool:
    """A PoolBackend that serves its whole arena, and takes nothing."""

    def __init__(self, arena: Arena) -> None:
        layers = range(arena.layout.layers)
        self._checksums = tuple(
            block_checksum(slice_checksums(arena, [(page, layer) for layer in layers]))
            for page in range(arena.pages)
        )

    def open_put(self, namespace: bytes, keys: Sequence[BlockKey]) -> PutGrant:
        return PutGrant(bytes(16), ())

    def commit_put(self, landing: LandingId, checksums: dict[int, int]) -> int:
        return 0

    def abort_put(self, landing: LandingId) -> None:
        pass

    def open_read(self, namespace: bytes, keys: Sequence[BlockKey], patience_s: float = 0.0) -> ReadGrant:
        return ReadGrant(1, tuple(range(len(keys))), self._checksums[: len(keys)])

    def close_read(self, lease: int) -> None:
        pass


def make(node: str, host: str, layout: KVLayout, pages: int, fill: int) -> tuple[Arena, Endpoint]:
    arena = Arena(layout, pages, "page" if node == "far" else "layer")
    for page in range(pages):
        for layer in range(layout.layers):
            arena.slice(page, layer)[:] = bytes([(fill + page + layer) % 256]) * layout.slice_bytes
    return arena, endpoint(Identity(node, new_incarnation()), arena, EndpointOptions(host=host))


async def serve(pipe: Pipe, host: str, layout: KVLayout, pages: int) -> None:
    """The other process: a landing for every message on the pipe, and a pool, until the pipe closes."""
    arena, plane = make("far", host, layout, pages, 1)
    await plane.start()
    plane.serve_pool(WholePool(arena))
    pipe.send(plane.ref)
    while (landing := await asyncio.to_thread(pipe.recv)) is not None:
        plane.open_landing(landing, range(pages), _ignore)
        pipe.send(landing)
    await plane.close()


def _ignore(commit: LandingCommit) -> None:
    pass


def serve_process(pipe: Pipe, host: str, layout: KVLayout, pages: int) -> None:
    asyncio.run(serve(pipe, host, layout, pages))


async def measure(name: str, way: str, layout: KVLayout, pages: int, repeats: int) -> list[Row]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_process, args=(there, WAYS[way], layout, pages)
    )
    process.start()
    target: NodeRef = await asyncio.to_thread(here.recv)
    arena, plane = make("near", WAYS[way], layout, pages, 2)
    await plane.start()
    rows = []
    for what, move in (
        ("fetch", fetch),
        ("write", write),
    ):  # in this order: writing replaces what the pool serves
        timings = [await move(plane, target, here, arena, number) for number in range(repeats + 1)][1:]
        rows.append(_row(name, way, what, arena.size_bytes, timings))
    assert plane.transports() == {"far": way}
    here.send(None)
    await plane.close()
    arena.close()
    await asyncio.to_thread(process.join)
    return rows


async def write(
    plane: Endpoint, target: NodeRef, pipe: Pipe, arena: Arena, number: int
) -> tuple[float, float]:
    """Seconds of time and of CPU for a hand-over of the whole arena, layer by layer."""
    landing = number.to_bytes(16, "big")
    pipe.send(landing)
    await asyncio.to_thread(pipe.recv)
    began, cpu = time.perf_counter(), time.process_time()
    stream = plane.open_write(target, landing)
    for layer in range(arena.layout.layers):
        stream.write(layer, [(page, page) for page in range(arena.pages)])
    reply = await stream.commit(arena.pages)
    assert reply.ok, reply.error
    return time.perf_counter() - began, time.process_time() - cpu


async def fetch(
    plane: Endpoint, target: NodeRef, pipe: Pipe, arena: Arena, number: int
) -> tuple[float, float]:
    keys = [page.to_bytes(16, "big") for page in range(arena.pages)]
    began, cpu = time.perf_counter(), time.process_time()
    result = await plane.fetch(target, NAMESPACE, keys, range(arena.pages))
    assert result.blocks == arena.pages, result.error
    return time.perf_counter() - began, time.process_time() - cpu


def memcpy(name: str, layout: KVLayout, pages: int, repeats: int) -> Row:
    """Slice by slice from one arena to another in one process."""
    source, target = Arena(layout, pages, "page"), Arena(layout, pages, "layer")
    timings = []
    for _ in range(repeats + 1):
        began, cpu = time.perf_counter(), time.process_time()
        for page in range(pages):
            for layer in range(layout.layers):
                target.slice(page, layer)[:] = source.slice(page, layer)
        timings.append((time.perf_counter() - began, time.process_time() - cpu))
    source.close()
    target.close()
    return _row(name, "memcpy", "copy", pages * layout.block_bytes, timings[1:])


def _row(name: str, way: str, what: str, size_bytes: int, timings: list[tuple[float, float]]) -> Row:
    """The best of the timings."""
    seconds, cpu_s = min(timings)
    return Row(name, way, what, round(size_bytes / seconds / 1e9, 3), round(cpu_s / size_bytes * 1e9, 3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256, help="how much to move each time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'layout':20} {'way':7} {'what':6} {'GB/s':>7} {'CPU s/GB':>9}")
    for name, layout in LAYOUTS.items():
        pages = max(1, options.megabytes * 1_000_000 // layout.block_bytes)
        new = [memcpy(name, layout, pages, options.repeats)]
        for way in WAYS:
            new += asyncio.run(measure(name, way, layout, pages, options.repeats))
        for row in new:
            print(
                f"{row.layout:20} {row.way:7} {row.what:6} {row.gigabytes_per_s:7.2f} {row.cpu_s_per_gigabyte:9.2f}"
            )
        rows += new
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
