"""Calibration finds the pace of an engine, within its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.core.costs.model import prefill_s, step_s
from shared.core.costs.presets import SMALL_MODEL_CPU
from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.dataplane.api import PageStore
from shared.engine.api import Engine, EngineConfig
from shared.engine.toy.engine import ToyEngine
from shared.protocol.model import ModelSpec
from shared.worker_node.calibrate import calibrate


class PacedEngine:
    """A toy whose steps take known times on a clock of its own."""

    def __init__(self, pages: int = 4096, slow: float = 1.0) -> None:
        self._toy = ToyEngine(EngineConfig("toy", kv_bytes=pages * 2048))
        self.spec: ModelSpec = self._toy.spec
        self.store: PageStore = self._toy.store
        self._slow = slow
        self.now = 0.0
        self.largest_tokens = 0
        """Of one sequence, its KV included."""

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        tokens = sum(s.tokens for s in sequences)
        self.largest_tokens = max(self.largest_tokens, *(s.start + s.tokens for s in sequences))
        if tokens > len(sequences):
            self.now += self._slow * (0.002 + 0.0003 * tokens)
        else:
            self.now += self._slow * (0.004 + 0.0005 * tokens + 1e-6 * sum(s.start + 1 for s in sequences))
        results = self._toy.run(sequences, on_layer)
        assert not any(result.error for result in results)
        return results

    def clock(self) -> float:
        return self.now

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        self._toy.close()


def test_finds_the_times_of_an_engine() -> None:
    engine = PacedEngine()
    cost = calibrate(as_engine(engine), clock=engine.clock)
    assert abs(prefill_s(cost, 500) / 0.152 - 1) < 0.15
    assert abs(step_s(cost, 8, 8 * 200) / 0.0096 - 1) < 0.15
    engine.close()


def test_stays_within_its_budget() -> None:
    for slow in (0.1, 1.0, 10.0):
        engine = PacedEngine(slow=slow)
        calibrate(as_engine(engine), 1.5, engine.clock)
        assert engine.now < 3.0
        engine.close()


def test_few_pages_are_enough() -> None:
    engine = PacedEngine(pages=2)
    cost = calibrate(as_engine(engine), clock=engine.clock)
    assert engine.now > 0.0
    assert engine.largest_tokens == 2 * engine.spec.layout.block_tokens  # what two pages hold was timed, and no more
    assert cost == SMALL_MODEL_CPU  # two lengths tell no time model: the prior stands
    engine.close()


def test_a_very_slow_engine_keeps_the_prior() -> None:
    engine = PacedEngine(slow=1000.0)
    assert calibrate(as_engine(engine), clock=engine.clock) == SMALL_MODEL_CPU
    engine.close()


def as_engine(engine: PacedEngine) -> Engine:
    return engine
