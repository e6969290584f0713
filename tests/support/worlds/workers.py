"""For driving prefill and decode machines by hand: requests, and a bench that checks their laws after every event."""

from __future__ import annotations

from typing import Any, TypeVar

from shared.core.kv.block_keys import block_keys, pack_tokens
from shared.core.machine import Ticked
from shared.core.worker import events as w
from shared.core.worker.config import DecodeConfig, PrefillConfig
from shared.core.worker.decode import DecodeMachine
from shared.core.worker.prefill import PrefillMachine
from shared.core.worker.steps import RunStep, SequenceResult, StepDone, StepFailed
from shared.core.worker.transfers import HandoffEnded, LandingArrived, PoolWriteEnded
from shared.protocol.ids import NodeRef
from shared.protocol.requests import (
    Accepted,
    BlockSource,
    HandoffTarget,
    LocalPrefill,
    PrefillJob,
    Reserved,
    ReserveRequest,
    TokenDelta,
)
from shared.protocol.sampling import SamplingParams

BLOCK = 4
NAMESPACE = b"n" * 16
LIFE = "life-1"
EOS = 99
GATEWAY, GATEWAY_LIFE = "gateway-0", "gateway-life-1"
SAMPLING = SamplingParams(temperature=0.0, eos_token_ids=(EOS,))
CACHE = NodeRef("cache-0", "c1")
DECODE = NodeRef("decode-0", "d1")
TARGET = HandoffTarget(DECODE, b"l" * 16)

T = TypeVar("T")


def prompt_of(tokens: int, salt: int = 0) -> list[int]:
    return [(7 * i + 13 * salt) % 90 for i in range(tokens)]


def keys_of(prompt: list[int]) -> tuple[bytes, ...]:
    return tuple(block_keys(NAMESPACE, pack_tokens(prompt), BLOCK))


def source(first: int, blocks: int, holder: NodeRef = CACHE) -> BlockSource:
    return BlockSource(holder, first, blocks)


def job(attempt: str, prompt: list[int], **fields: Any) -> PrefillJob:
    fields = {"handoff": TARGET, "max_new_tokens": 10, "sampling": SAMPLING, "pool": CACHE} | fields
    return PrefillJob(
        attempt=attempt,
        gateway=fields.pop("gateway", GATEWAY),
        gateway_incarnation=fields.pop("gateway_incarnation", GATEWAY_LIFE),
        incarnation=fields.pop("incarnation", LIFE),
        namespace=fields.pop("namespace", NAMESPACE),
        tokens=pack_tokens(prompt),
        block_keys=fields.pop("block_keys", keys_of(prompt)),
        **fields,
    )


def reserve(attempt: str, prompt: list[int], *, local: bool = False, **fields: Any) -> ReserveRequest:
    fields = {"max_new_tokens": 10, "sampling": SAMPLING, "pool": CACHE} | fields
    sources = fields.pop("sources", ())
    return ReserveRequest(
        attempt=attempt,
        gateway=fields.pop("gateway", GATEWAY),
        gateway_incarnation=fields.pop("gateway_incarnation", GATEWAY_LIFE),
        incarnation=fields.pop("incarnation", LIFE),
        namespace=fields.pop("namespace", NAMESPACE),
        prompt_tokens=len(prompt),
        block_keys=fields.pop("block_keys", keys_of(prompt)),
        tail_tokens=fields.pop("tail_tokens", tuple(prompt[len(prompt) // BLOCK * BLOCK :])),
        local=LocalPrefill(pack_tokens(prompt), sources) if local else None,
        **fields,
    )


class Bench:
    """One machine, its clock and a fake engine. `run` says which token the running step samples."""

    def __init__(self, machine: PrefillMachine | DecodeMachine) -> None:
        self.machine = machine
        self.now = 100.0
        self.asks = 0
        self.step: RunStep | None = None
        self.deltas: list[TokenDelta] = []

    def do(self, event: Any) -> list[Any]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        for command in commands:
            if isinstance(command, RunStep):
                assert self.step is None, "two steps are out"
                self.step = command
            elif isinstance(command, w.SendTokens):
                self.deltas.extend(command.deltas)
        return commands

    def submit(self, request: PrefillJob | ReserveRequest) -> list[Any]:
        self.asks += 1
        if isinstance(request, PrefillJob):
            return self.do(w.JobSubmitted(request, self.asks))
        return self.do(w.ReserveAsked(request, self.asks))

    def answer(self, request: PrefillJob | ReserveRequest) -> Any:
        """What the machine replies to a request."""
        (reply,) = only(self.submit(request), w.Reply)
        assert reply.ask == self.asks
        return reply.message

    def sync(self, attempt: str, from_index: int = 0) -> Any:
        self.asks += 1
        (reply,) = only(self.do(w.SyncAsked(attempt, from_index, self.asks)), w.Reply)
        return reply.message

    def run(self, token: int = 1, *, errors: tuple[str, ...] = (), repeats: int = 1) -> list[Any]:
        """Finish the running step. Each sequence that samples gets `token`."""
        assert self.step is not None, "no step is out"
        step, self.step = self.step, None
        results = tuple(
            SequenceResult(s.attempt, error="broken")
            if s.attempt in errors
            else SequenceResult(s.attempt, (token,) * repeats if s.sample else ())
            for s in step.sequences
        )
        return self.do(StepDone(step.step, results, repeats, 0.01 * repeats))

    def fail_step(self) -> list[Any]:
        """Fail the running step as a whole."""
        assert self.step is not None, "no step is out"
        step, self.step = self.step, None
        return self.do(StepFailed(step.step, "the engine raised"))

    def tick(self, seconds: float) -> list[Any]:
        """Let so much time pass, with a tick at least once a second."""
        end, commands = self.now + seconds, []
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            commands += self.do(Ticked())
        return commands

    def said(self, attempt: str) -> list[int]:
        """Tokens sent for an attempt so far."""
        return [t for d in self.deltas if d.attempt == attempt for t in d.tokens]

    def finish(self, attempt: str) -> str | None:
        ends = [d.finish for d in self.deltas if d.attempt == attempt and d.finish is not None]
        assert len(ends) <= 1, f"{attempt} ended {len(ends)} times"
        return ends[0] if ends else None

    def idle(self) -> None:
        """Check that nothing is left behind."""
        assert self.machine.pool.held == 0
        assert self.machine.attempts() == ()
        assert self.machine.load(self.now).queue_s == 0.0


def only(commands: list[Any], kind: type[T]) -> list[T]:
    return [c for c in commands if isinstance(c, kind)]


def prefill_bench(**fields: Any) -> Bench:
    return Bench(PrefillMachine(PrefillConfig(**_config("prefill-0", fields))))


def decode_bench(**fields: Any) -> Bench:
    return Bench(DecodeMachine(DecodeConfig(**_config("decode-0", fields))))


def _config(node: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "node": node,
        "incarnation": LIFE,
        "namespace": NAMESPACE,
        "block_tokens": BLOCK,
        "pages": 32,
        "chunk_tokens": 8,
    } | fields


def end_transfers(bench: Bench, attempt: str, ok: bool = True) -> list[Any]:
    return bench.do(HandoffEnded(attempt, ok)) + bench.do(PoolWriteEnded(attempt, 1))


def prefilled(bench: Bench, attempt: str, prompt: list[int], **fields: Any) -> None:
    """Run a prompt's prefill to its end, including the hand-over."""
    assert bench.answer(job(attempt, prompt, **fields)) == Accepted(attempt)
    while bench.step is not None:
        bench.run()
    end_transfers(bench, attempt)


def land(bench: Bench, attempt: str, prompt: list[int], *, first: int = 1, **fields: Any) -> list[Any]:
    """Reserve, and let the KV and first token arrive."""
    assert isinstance(bench.answer(reserve(attempt, prompt, **fields)), Reserved)
    return bench.do(LandingArrived(attempt, first))
