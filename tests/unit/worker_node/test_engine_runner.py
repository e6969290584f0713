"""The engine's thread: steps in order, failures as events, and how long the present one takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from shared.core.kv.block_keys import pack_tokens
from shared.core.worker.steps import RunStep, SequenceResult, SequenceStep, StepDone, StepFailed
from shared.engine.api import Engine, EngineConfig, EngineLost
from shared.engine.load import load_engine
from shared.protocol.sampling import SamplingParams
from shared.worker_node.engine_runner import EngineRunner


def step(number: int) -> RunStep:
    sequence = SequenceStep(f"a{number}", 0, 3, pack_tokens([1, 2, 3]), (0,), SamplingParams(temperature=0.0))
    return RunStep(number, (sequence,))


class Gated:
    """A toy engine whose steps wait to be let go, or fail."""

    def __init__(self) -> None:
        self.toy = load_engine(EngineConfig(model="toy", kv_bytes=1 << 16), lambda what, part: None)
        self.spec, self.store = self.toy.spec, self.toy.store
        self.gate = threading.Semaphore(0)
        self.fails = False
        self.error: Exception = MemoryError("no room")
        self.threads: set[str] = set()

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        self.threads.add(threading.current_thread().name)
        self.gate.acquire()
        if self.fails:
            raise self.error
        return self.toy.run(sequences, on_layer)

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        self.toy.close()


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[tuple[EngineRunner, asyncio.Queue[StepDone | StepFailed]]]:
    ends: asyncio.Queue[StepDone | StepFailed] = asyncio.Queue()
    runner = EngineRunner(engine, ends.put_nowait)
    try:
        yield runner, ends
    finally:
        await asyncio.to_thread(runner.close)


async def test_steps_run_in_order_in_one_thread_and_tell_their_layers() -> None:
    engine = Gated()
    layers: list[int] = []
    async with running(engine) as (runner, ends):
        runner.submit(step(1), layers.append)
        runner.submit(step(2))
        engine.gate.release(2)
        first, second = await ends.get(), await ends.get()
    assert isinstance(first, StepDone)
    assert (first.step, first.steps, second.step) == (1, 1, 2)
    assert len(first.results[0].tokens) == 1
    assert first.seconds > 0
    assert layers == list(range(engine.spec.layout.layers))
    assert engine.threads == {"engine"}


async def test_a_step_that_raises_ends_as_failed_and_the_next_one_runs() -> None:
    engine = Gated()
    async with running(engine) as (runner, ends):
        engine.fails = True
        runner.submit(step(1))
        engine.gate.release()
        assert await ends.get() == StepFailed(1, "MemoryError: no room")
        engine.fails = False
        runner.submit(step(2))
        engine.gate.release()
        assert isinstance(await ends.get(), StepDone)


async def test_nobody_is_blamed_for_a_step_that_lost_the_engine() -> None:
    engine = Gated()
    async with running(engine) as (runner, ends):
        engine.fails, engine.error = True, EngineLost("a stage has gone")
        runner.submit(step(1))
        runner.submit(step(2))
        engine.gate.release(2)
        assert await asyncio.to_thread(runner.close)
        assert ends.empty()
        assert runner.busy_s() == 0.0


async def test_how_long_the_present_step_takes() -> None:
    engine = Gated()
    async with running(engine) as (runner, ends):
        assert runner.busy_s() == 0.0
        runner.submit(step(1))
        while runner.busy_s() == 0.0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        engine.gate.release()
        await ends.get()
        assert runner.busy_s() == 0.0


async def test_closing_ends_the_thread() -> None:
    engine = Gated()
    async with running(engine) as (runner, _):
        pass
    assert runner.close()
