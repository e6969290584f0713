"""Stand-ins for conductor, prefill and decode nodes on a bus, in this process. They make the toy engine's tokens without
KV, data plane or machines, and can be told to fail. For tests of the gateway only."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

from msgspec import Struct

from shared.core.kv.block_keys import pack_tokens, unpack_tokens
from shared.core.worker.steps import SequenceStep
from shared.engine.toy.choice import pick, shape, toy_follower
from shared.engine.toy.engine import toy_spec
from shared.engine.toy.model import ScriptedFailure, Transcript, next_logits
from shared.io.bus import Bus, Subscription
from shared.protocol import subjects
from shared.protocol.cluster import NodeInfo, NodeLeft, NodeLoad, RollCall, Stage
from shared.protocol.errors import Overloaded, TsukimiError, Unavailable
from shared.protocol.ids import AttemptId, NodeRef, Role, new_incarnation
from shared.protocol.model import ModelSpec
from shared.protocol.requests import (
    Accepted,
    AttemptState,
    CancelAttempt,
    Placement,
    PlaceRequest,
    PrefillJob,
    Reserved,
    ReserveRequest,
    SyncRequest,
    TokenBatch,
    TokenDelta,
)
from shared.protocol.sampling import SamplingParams, TokenLogprob

SPEC = toy_spec()
HEARTBEAT_S = 0.1


class Work(Struct):
    """One attempt at a node. `made` has the answer's tokens from `first_index` on, received or made here."""

    gateway: str
    sampling: SamplingParams
    prompt: list[int]
    first_index: int
    most: int
    """Most tokens that may be made."""
    made: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: str | None = None
    error: str = ""
    cached: int | None = None


def next_token(
    tokens: list[int], sampling: SamplingParams, answered: int = 0
) -> tuple[int, TokenLogprob | None]:
    """`answered`: how many of `tokens`, at the end, belong to the answer."""
    transcript = Transcript(bytes(t & 0xFF for t in tokens), bytes(t >> 8 for t in tokens))
    content = blake2b(repr(tokens).encode(), digest_size=16).digest()
    logits = next_logits(transcript, content)
    if not sampling.reshapes:
        return pick(logits, sampling, len(tokens))
    step = SequenceStep("", len(tokens) - 1, 1, b"", (), sampling, pack_tokens(tokens), answered)
    return pick(logits, sampling, len(tokens), shape(logits, step, toy_follower(), content))


class FakeNode:
    """One life of a node. `token_s`: seconds per token. `lose`: deltas for which it returns True are not sent."""

    def __init__(self, bus: Bus, role: Role, name: str, spec: ModelSpec = SPEC) -> None:
        self.bus = bus
        self.role = role
        self.spec = spec
        self.ref = NodeRef(name, new_incarnation(), tcp="127.0.0.1:1", host="here")
        self.stage: Stage = "ready"
        self.token_s = 0.0
        self.lose: Callable[[TokenDelta], bool] = lambda _: False
        self.refuse: TsukimiError | None = None
        self.work: dict[AttemptId, Work] = {}
        self.over: dict[AttemptId, Work] = {}
        self.cancelled: dict[AttemptId, str] = {}
        self.asked: list[PrefillJob | ReserveRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []
        self._seq = itertools.count(1)

    async def start(self) -> None:
        subscribe = self.bus.subscribe
        self._subscriptions.append(await subscribe(subjects.ROLL_CALL, RollCall, self._on_roll_call))
        name = self.ref.node
        if self.role in ("prefill", "decode"):
            self._subscriptions += [
                await subscribe(subjects.cancel(name), CancelAttempt, self._on_cancel),
                await subscribe(subjects.sync(name), SyncRequest, self._on_sync),
            ]
        await self._serve()
        await self.announce()
        self.spawn(self._beat())

    async def _serve(self) -> None:
        """Subscribe to the role's own subjects."""

    async def stop(self) -> None:
        """Go silent, as after kill -9."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.work.clear()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def leave(self) -> None:
        await self.stop()
        await self.bus.publish(subjects.LEAVE, NodeLeft(self.ref.node, self.ref.incarnation))

    async def announce(self, stage: Stage | None = None) -> None:
        self.stage = stage or self.stage
        info = NodeInfo(
            self.ref,
            self.role,
            self.stage,
            model=self.spec if self.role in ("prefill", "decode") else None,
            kv_blocks=1 << 16,
        )
        await self.bus.publish(subjects.ANNOUNCE, info)

    def spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            load = NodeLoad(
                self.ref.node,
                self.ref.incarnation,
                self.role,
                next(self._seq),
                self.stage,
                counters={"steps": 7.0},
            )
            await self.bus.publish(subjects.heartbeat(self.role, self.ref.node), load)
            await asyncio.sleep(HEARTBEAT_S)

    async def _on_roll_call(self, _: RollCall) -> None:
        await self.announce()

    async def _on_cancel(self, message: CancelAttempt) -> None:
        self.cancelled.setdefault(message.attempt, message.reason)
        if (work := self.work.pop(message.attempt, None)) is not None:
            self.over[message.attempt] = work

    async def _on_sync(self, message: SyncRequest) -> AttemptState:
        work = self.work.get(message.attempt) or self.over.get(message.attempt)
        if work is None or message.attempt in self.cancelled:
            return AttemptState(message.attempt, "unknown")
        state: Literal["running", "finished"] = "running" if message.attempt in self.work else "finished"
        skip = max(0, message.from_index - work.first_index)
        delta = None
        if work.made[skip:] or work.finish:
            delta = self._delta(message.attempt, work, min(skip, len(work.made)))
        return AttemptState(message.attempt, state, delta)

    def _delta(self, attempt: AttemptId, work: Work, start: int) -> TokenDelta:
        return TokenDelta(
            attempt,
            work.first_index + start,
            tuple(work.made[start:]),
            tuple(work.logprobs[start:]),
            work.finish,  # type: ignore[arg-type]
            work.error,
            work.cached if start == 0 else None,
        )

    async def send(self, attempt: AttemptId, work: Work) -> None:
        """Send the token just made, or the failure."""
        delta = self._delta(attempt, work, len(work.made) - (0 if work.error else 1))
        if not self.lose(delta):
            batch = TokenBatch(self.ref.node, self.ref.incarnation, (delta,))
            await self.bus.publish(subjects.tokens(work.gateway), batch)

    def _step(self, work: Work, so_far: list[int]) -> None:
        try:
            answered = work.first_index + len(work.made)
            token, logprob = next_token(work.prompt + so_far + work.made, work.sampling, answered)
        except ScriptedFailure as failure:
            work.finish, work.error = "failed", str(failure)
            return
        work.made.append(token)
        if logprob is not None:
            work.logprobs.append(logprob)
        if token in work.sampling.eos_token_ids and not work.sampling.ignore_eos:
            work.finish = "stop"


class FakeDecode(FakeNode):
    def __init__(self, bus: Bus, name: str = "decode-0", spec: ModelSpec = SPEC) -> None:
        super().__init__(bus, "decode", name, spec)

    async def _serve(self) -> None:
        subject = subjects.reserve(self.ref.node)
        self._subscriptions.append(await self.bus.subscribe(subject, ReserveRequest, self._on_reserve))

    async def _on_reserve(self, request: ReserveRequest) -> Reserved:
        self.asked.append(request)
        if self.refuse is not None:
            raise self.refuse
        local = request.local is not None
        prompt = unpack_tokens(request.local.tokens) if request.local is not None else []
        first = request.first_index if local else request.first_index + 1
        most = request.max_new_tokens - (0 if local else 1)
        work = Work(request.gateway, request.sampling, prompt, first, most, cached=0 if local else None)
        self.work[request.attempt] = work
        if local:
            self.spawn(self._decode(request.attempt, work, []))
        return Reserved(request.attempt, b"L" * 16, 1)

    def arrive(self, attempt: AttemptId, prompt: list[int], first_token: int) -> None:
        """The prompt's KV has arrived."""
        if (work := self.work.get(attempt)) is not None:
            work.prompt = prompt
            self.spawn(self._decode(attempt, work, [first_token]))

    async def _decode(self, attempt: AttemptId, work: Work, so_far: list[int]) -> None:
        while work.finish is None:
            await asyncio.sleep(self.token_s)
            if attempt not in self.work:
                return
            self._step(work, so_far)
            if work.finish is None and len(work.made) == work.most:
                work.finish = "length"
            if work.finish is not None:
                self.over[attempt] = self.work.pop(attempt)
            await self.send(attempt, work)

    async def give_up_all(self) -> None:
        """Give up all attempts, as a draining node does."""
        for attempt, work in list(self.work.items()):
            del self.work[attempt]
            delta = TokenDelta(attempt, work.first_index + len(work.made), finish="moved")
            batch = TokenBatch(self.ref.node, self.ref.incarnation, (delta,))
            await self.bus.publish(subjects.tokens(work.gateway), batch)


class FakePrefill(FakeNode):
    """Hands over to the FakeDecode in `peers` that the target names, if it is the same life."""

    def __init__(self, bus: Bus, name: str = "prefill-0", spec: ModelSpec = SPEC) -> None:
        super().__init__(bus, "prefill", name, spec)
        self.peers: dict[str, FakeDecode] = {}
        self.warm_tokens = 0
        """Most prompt tokens to report as cached."""

    async def _serve(self) -> None:
        subject = subjects.prefill(self.ref.node)
        self._subscriptions.append(await self.bus.subscribe(subject, PrefillJob, self._on_job))

    async def _on_job(self, job: PrefillJob) -> Accepted:
        self.asked.append(job)
        if self.refuse is not None:
            raise self.refuse
        prompt = unpack_tokens(job.tokens)
        work = Work(
            job.gateway,
            job.sampling,
            prompt,
            job.first_index,
            1,
            cached=min(self.warm_tokens, len(prompt) - 1),
        )
        self.work[job.attempt] = work
        self.spawn(self._prefill(job, work))
        return Accepted(job.attempt)

    async def _prefill(self, job: PrefillJob, work: Work) -> None:
        await asyncio.sleep(self.token_s)
        if job.attempt not in self.work:
            return
        self._step(work, [])
        if work.finish is None and job.max_new_tokens == 1:
            work.finish = "length"
        self.over[job.attempt] = self.work.pop(job.attempt)
        await self.send(job.attempt, work)
        if work.finish is None and job.handoff is not None:
            peer = self.peers.get(job.handoff.decode.node)
            if peer is not None and peer.ref == job.handoff.decode:
                peer.arrive(job.attempt, work.prompt, work.made[0])


class FakeConductor(FakeNode):
    """Places attempts round-robin on the nodes in `prefills` and `decodes`."""

    def __init__(self, bus: Bus, name: str = "conductor-0") -> None:
        super().__init__(bus, "conductor", name)
        self.prefills: list[FakeNode] = []
        self.decodes: list[FakeNode] = []
        self.placed: list[PlaceRequest] = []
        self.local = False
        self._turn = itertools.count()

    async def _serve(self) -> None:
        queue = subjects.QUEUE_CONDUCTOR
        self._subscriptions.append(
            await self.bus.subscribe(subjects.PLACE, PlaceRequest, self._on_place, queue=queue)
        )

    async def _on_place(self, request: PlaceRequest) -> Placement:
        self.placed.append(request)
        if self.refuse is not None:
            raise self.refuse
        avoid = set(request.avoid)
        turn = next(self._turn)
        prefill = _choose(self.prefills, avoid, turn)
        decode = _choose(self.decodes, avoid, turn)
        if decode is None or (prefill is None and not self.local):
            raise Unavailable("no node is ready")
        one = request.max_new_tokens == 1 and not self.local
        return Placement(
            request.attempt,
            None if self.local or prefill is None else prefill.ref,
            None if one else decode.ref,
        )


def _choose(nodes: list[FakeNode], avoid: set[tuple[str, str]], turn: int) -> FakeNode | None:
    ready = [n for n in nodes if n.stage == "ready" and (n.ref.node, n.ref.incarnation) not in avoid]
    return ready[turn % len(ready)] if ready else None


BUSY = Overloaded("busy", retry_after_s=2.5)
