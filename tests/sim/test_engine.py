from __future__ import annotations

import pytest

from shared.core.costs.model import compute_s, repeat_s, step_s
from shared.core.costs.presets import LLAMA2_70B_8XA800
from shared.core.worker.steps import InterruptRun, RunStep, SequenceStep, StepDone
from shared.protocol.sampling import SamplingParams
from tsukimi.simulate.engine import CostEngine
from tsukimi.simulate.timeline import Timeline

COST = LLAMA2_70B_8XA800


class Bench:
    def __init__(self) -> None:
        self.timeline = Timeline(0.0)
        self.done: list[tuple[float, StepDone]] = []
        self.ran: list[tuple[int, float, float]] = []
        self.engine = CostEngine(COST, self.timeline, self._done, self._ran)

    def _done(self, event: StepDone) -> None:
        self.done.append((self.timeline.now, event))

    def _ran(
        self,
        attempts: tuple[str, ...],
        started_s: float,
        ended_s: float,
        steps: int,
        step_s: float,
        growth_s: float,
    ) -> None:
        self.ran.append((steps, step_s, growth_s))


def decode(*contexts: int, up_to: int = 1, step: int = 1) -> RunStep:
    rows = tuple(
        SequenceStep(f"a{i}", context - 1, 1, b"\0\0\0\0", (), SamplingParams())
        for i, context in enumerate(contexts)
    )
    return RunStep(step, rows, up_to)


def test_a_prompt_takes_what_the_cost_model_says() -> None:
    bench = Bench()
    row = SequenceStep("a", 512, 1000, b"", (), SamplingParams())
    bench.engine.start(RunStep(1, (row,)))
    bench.timeline.run()
    ((at, event),) = bench.done
    assert at == pytest.approx(compute_s(COST, 512, 1000))
    assert event.results[0].tokens
    assert event.seconds == pytest.approx(at)


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    bench = Bench()
    bench.engine.start(RunStep(1, (SequenceStep("a", 0, 1000, b"", (), None),)))
    bench.timeline.run()
    assert bench.done[0][1].results[0].tokens == ()


def test_repeats_are_skipped_over_in_one_event() -> None:
    bench = Bench()
    bench.engine.start(decode(1000, 2000, up_to=300))
    bench.timeline.run()
    ((at, event),) = bench.done
    assert event.steps == 300
    assert [len(r.tokens) for r in event.results] == [300, 300]
    assert at == pytest.approx(repeat_s(COST, 2, 3000, 300))


def test_an_interrupt_ends_the_run_after_the_step_that_is_running() -> None:
    bench = Bench()
    one = step_s(COST, 2, 3000)
    bench.engine.start(decode(1000, 2000, up_to=300))
    bench.timeline.at(3.5 * one, lambda _: bench.engine.interrupt(InterruptRun(1)))
    bench.timeline.run()
    ((at, event),) = bench.done
    assert event.steps == 4
    assert at == pytest.approx(repeat_s(COST, 2, 3000, 4))
    assert bench.ran[0][0] == 4


def test_interrupts_of_other_steps_and_in_the_last_step_change_nothing() -> None:
    bench = Bench()
    bench.engine.start(decode(1000, up_to=3))
    bench.timeline.at(0.001, lambda _: bench.engine.interrupt(InterruptRun(7)))
    bench.timeline.at(2.5 * step_s(COST, 1, 1000), lambda _: bench.engine.interrupt(InterruptRun(1)))
    bench.timeline.run()
    assert [e.steps for _, e in bench.done] == [3]
    bench.engine.interrupt(InterruptRun(1))
    bench.engine.start(decode(1000, step=2))
    bench.timeline.run()
    assert [e.step for _, e in bench.done] == [1, 2]
