"""Worker services as real processes, and a test-driven gateway: it places, reserves, submits and listens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from shared.core.kv.block_keys import block_keys, pack_tokens
from shared.io.bus import Bus
from shared.io.nats_bus import connect
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall
from shared.protocol.ids import NodeRef, attempt_id
from shared.protocol.requests import (
    Accepted,
    AttemptState,
    BlockSource,
    CancelAttempt,
    HandoffTarget,
    LocalPrefill,
    PrefillJob,
    Reserved,
    ReserveRequest,
    SyncRequest,
    TokenBatch,
    TokenDelta,
)
from shared.protocol.sampling import SamplingParams
from tests.support.processes.spawn import spawn, tail

GATEWAY, LIFE = "gateway-0", "0123456789abcdef"
GREEDY = SamplingParams(temperature=0.0, eos_token_ids=(257,))
MODULES = {"prefill": "services.prefill", "decode": "services.decode", "cache": "services.cache_node"}
PATIENCE_S = 60.0


class Workers:
    """The service processes of a test, by node name."""

    def __init__(self, folder: Path, nats_url: str) -> None:
        self.folder = folder
        self.nats_url = nats_url
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, **fields: Any) -> None:
        role = node.partition("-")[0]
        fields = {"node": node, "nats_url": self.nats_url, "heartbeat_s": 0.1, "host": "test-host"} | fields
        if role == "cache":
            fields.setdefault("pool_bytes", 4 << 20)
        else:
            fields = {"model": "toy", "kv_bytes": 2 << 20, "block_tokens": 16} | fields
        arguments = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
        self.processes[node] = spawn(
            [sys.executable, "-m", MODULES[role], *arguments], log=self.log(node), cwd=Path.cwd()
        )

    def log(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def kill(self, node: str) -> None:
        process = self.processes.pop(node)
        process.kill()
        process.wait(10.0)

    def terminate(self, node: str) -> subprocess.Popen[bytes]:
        process = self.processes.pop(node)
        process.send_signal(signal.SIGTERM)
        return process

    def close(self) -> None:
        for node in list(self.processes):
            self.kill(node)


class HandGateway:
    """Keeps every node's announcement and last heartbeat, and every delta sent to it."""

    def __init__(self, bus: Bus, workers: Workers) -> None:
        self.bus = bus
        self.workers = workers
        self.infos: dict[str, NodeInfo] = {}
        self.loads: dict[str, NodeLoad] = {}
        self.deltas: dict[str, list[TokenDelta]] = defaultdict(list)
        self.batches: list[TokenBatch] = []
        self.changed = asyncio.Condition()
        self.alive = True
        self._seq = 0

    async def listen(self) -> None:
        await self.bus.subscribe(subjects.tokens(GATEWAY), TokenBatch, self._on_tokens)
        await self.bus.subscribe(subjects.ANNOUNCE, NodeInfo, self._on_info)
        await self.bus.subscribe(subjects.HEARTBEAT_ALL, NodeLoad, self._on_load)
        await self.bus.subscribe(subjects.LEAVE, NodeLeft, self._on_left)
        await self.bus.publish(subjects.ROLL_CALL, RollCall("test"))

    async def beat(self) -> None:
        while True:
            if self.alive:
                self._seq += 1
                load = NodeLoad(GATEWAY, LIFE, "gateway", self._seq, "ready")
                await self.bus.publish(subjects.heartbeat("gateway", GATEWAY), load)
            await asyncio.sleep(0.1)

    # -- hearing ---------------------------------------------------------------------------------------------------

    async def _on_tokens(self, batch: TokenBatch) -> None:
        self.batches.append(batch)
        for delta in batch.deltas:
            self.deltas[delta.attempt].append(delta)
        await self._notify()

    async def _on_info(self, info: NodeInfo) -> None:
        self.infos[info.ref.node] = info
        await self._notify()

    async def _on_load(self, load: NodeLoad) -> None:
        self.loads[load.node] = load
        await self._notify()

    async def _on_left(self, left: NodeLeft) -> None:
        self.infos.pop(left.node, None)
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            async with self.changed:
                await self.changed.wait_for(holds)

        try:
            async with asyncio.timeout(PATIENCE_S):
                await wait()
        except TimeoutError:
            logs = "\n".join(tail(path, 15) for path in sorted(self.workers.folder.glob("*.log")))
            raise AssertionError(f"not within {PATIENCE_S} s: {what}\n{logs}") from None

    async def ready(self, *nodes: str) -> None:
        await self.until(
            lambda: all(n in self.infos and self.infos[n].stage == "ready" for n in nodes),
            f"{nodes} are ready, {[(i.ref.node, i.stage, i.detail) for i in self.infos.values()]}",
        )

    async def idle(self, *nodes: str) -> None:
        """Wait until, by their heartbeats, the nodes hold nothing."""
        await self.until(
            lambda: all(self.loads[n].kv_blocks_held == 0 and not self.loads[n].attempts for n in nodes),
            f"{nodes} are idle",
        )

    def ref(self, node: str) -> NodeRef:
        return self.infos[node].ref

    def counter(self, node: str, name: str) -> float:
        return self.loads[node].counters.get(name, 0)

    # -- asking ----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: list[int],
        count: int,
        *,
        prefill: str = "prefill-0",
        decode: str = "decode-0",
        pool: str = "cache-0",
        cached: int = 0,
        local: bool = False,
        **fields: Any,
    ) -> str:
        """Place an attempt; `cached` blocks are said to be in the pool. Returns its id."""
        attempt = fields.pop("attempt", "") or attempt_id(str(uuid.uuid4()), 0, 0)
        spec = self.infos[decode].model
        assert spec is not None
        size = spec.layout.block_tokens
        tokens = pack_tokens(prompt)
        sources = (BlockSource(self.ref(pool), 0, cached),) if cached else ()
        common: dict[str, Any] = {
            "attempt": attempt,
            "gateway": GATEWAY,
            "gateway_incarnation": LIFE,
            "namespace": spec.namespace,
            "block_keys": tuple(block_keys(spec.namespace, tokens, size)),
            "sampling": GREEDY,
            "max_new_tokens": count,
            "pool": self.ref(pool) if pool in self.infos else None,
        } | fields
        target = None
        if count > 1 or local:
            request = ReserveRequest(
                incarnation=self.ref(decode).incarnation,
                prompt_tokens=len(prompt),
                tail_tokens=tuple(prompt[len(prompt) // size * size :]),
                local=LocalPrefill(tokens, sources) if local else None,
                **common,
            )
            reserved = await self.bus.request(subjects.reserve(decode), request, Reserved, 10.0)
            target = HandoffTarget(self.ref(decode), reserved.landing)
        if not local:
            job = PrefillJob(
                incarnation=self.ref(prefill).incarnation,
                tokens=tokens,
                sources=sources,
                handoff=target,
                **common,
            )
            await self.bus.request(subjects.prefill(prefill), job, Accepted, 10.0)
        return attempt

    def said(self, attempt: str) -> list[int]:
        """The answer's tokens so far, ordered by index."""
        by_index = {d.index + i: t for d in self.deltas[attempt] for i, t in enumerate(d.tokens)}
        return [by_index[i] for i in sorted(by_index)]

    def finish(self, attempt: str) -> str | None:
        return next((d.finish for d in self.deltas[attempt] if d.finish is not None), None)

    def cached(self, attempt: str) -> int:
        return next(d.cached_tokens for d in self.deltas[attempt] if d.cached_tokens is not None)

    async def answer(self, prompt: list[int], count: int, **options: Any) -> list[int]:
        """A whole answer."""
        attempt = await self.submit(prompt, count, **options)
        await self.ended(attempt)
        assert self.finish(attempt) in ("stop", "length"), self.deltas[attempt][-1]
        return self.said(attempt)

    async def ended(self, attempt: str) -> None:
        await self.until(lambda: self.finish(attempt) is not None, f"{attempt} ends")

    async def cancel(self, attempt: str, *nodes: str) -> None:
        for node in nodes:
            await self.bus.publish(subjects.cancel(node), CancelAttempt(attempt, "test"))

    async def sync(self, node: str, attempt: str, from_index: int = 0) -> AttemptState:
        state: AttemptState = await self.bus.request(
            subjects.sync(node), SyncRequest(attempt, from_index), AttemptState, 10.0
        )
        return state


@contextlib.asynccontextmanager
async def hand_gateway(folder: Path, nats_url: str, *, beats: bool = True) -> AsyncIterator[HandGateway]:
    """A gateway without nodes yet: start some with `gateway.workers`."""
    workers = Workers(folder, nats_url)
    bus = await connect(nats_url, name="test")
    gateway = HandGateway(bus, workers)
    beating: asyncio.Task[None] | None = None
    try:
        await gateway.listen()
        beating = asyncio.create_task(gateway.beat()) if beats else None
        yield gateway
    finally:
        if beating is not None:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating
        await bus.close()
        workers.close()
