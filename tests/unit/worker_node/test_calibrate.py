"""Calibration finds the pace of an engine, within its budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import pytest

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

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        tokens = sum(s.tokens for s in sequences)
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


def test_a_slower_engine_is_slower_by_its_factor() -> None:
    costs = {}
    for slow in (0.25, 1.0, 4.0):
        engine = PacedEngine(slow=slow)
        costs[slow] = calibrate(as_engine(engine), clock=engine.clock)
        engine.close()
    for cost in costs.values():
        assert all(0.0 <= seconds < math.inf for seconds in msgspec.structs.astuple(cost))
    for slow, cost in costs.items():
        assert prefill_s(cost, 500) == pytest.approx(slow * prefill_s(costs[1.0], 500), rel=0.05)
        assert step_s(cost, 8, 1600) == pytest.approx(slow * step_s(costs[1.0], 8, 1600), rel=0.05)


@pytest.mark.parametrize("slow", [0.1, 1.0, 4.0, 10.0, 30.0])
def test_stays_within_its_budget(slow: float) -> None:
    engine = PacedEngine(slow=slow)
    calibrate(as_engine(engine), 1.5, engine.clock)
    assert 0.0 < engine.now < 2.0
    engine.close()


def test_a_larger_budget_is_made_use_of() -> None:
    """Ten times slower, and ten times the budget: all is learnt that the engine at its own pace tells."""
    engine = PacedEngine(slow=10.0)
    cost = calibrate(as_engine(engine), 15.0, engine.clock)
    assert 1.5 < engine.now < 15.0
    assert prefill_s(cost, 500) == pytest.approx(1.52, rel=0.15)
    assert step_s(cost, 8, 1600) == pytest.approx(0.096, rel=0.15)
    engine.close()


def test_with_few_pages_it_learns_from_what_fits() -> None:
    """Eight pages hold four prompts and two decodes: enough for the one, too few for the other."""
    engine = PacedEngine(pages=8)
    cost = calibrate(as_engine(engine), clock=engine.clock)
    assert prefill_s(cost, 100) == pytest.approx(0.032, rel=0.15)
    assert step_s(cost, 8, 1600) == step_s(SMALL_MODEL_CPU, 8, 1600)
    engine.close()


@pytest.mark.parametrize("pages", [1, 2])
def test_with_hardly_any_pages_the_prior_stands(pages: int) -> None:
    engine = PacedEngine(pages=pages)
    assert calibrate(as_engine(engine), clock=engine.clock) == SMALL_MODEL_CPU
    assert engine.now > 0.0, "what fits was tried"
    engine.close()


def test_a_very_slow_engine_keeps_the_prior() -> None:
    engine = PacedEngine(slow=1000.0)
    assert calibrate(as_engine(engine), clock=engine.clock) == SMALL_MODEL_CPU
    engine.close()


def as_engine(engine: PacedEngine) -> Engine:
    return engine
