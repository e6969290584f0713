"""Engine steps in one dedicated thread, in order, off the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

import structlog
from msgspec import Struct

from shared.core.worker.steps import RunStep, StepDone, StepFailed
from shared.engine.api import Engine, EngineLost, OnLayer

JOIN_S = 2.0

log = structlog.get_logger(__name__)


class _Step(Struct):
    command: RunStep
    on_layer: OnLayer | None


class EngineRunner:
    """Runs the steps it is given one after the other. Public methods are for the event loop's thread. A step that
    raises ends as StepFailed; one that loses the engine does not end: its sequences are not to blame, and whoever asks
    the engine for its fault ends the process.

    Steps are run once, however often they may repeat: tokens stream, and nothing needs to be interrupted.
    """

    def __init__(self, engine: Engine, on_end: Callable[[StepDone | StepFailed], None]) -> None:
        self._engine = engine
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._began: float | None = None
        self.engine_s = 0.0
        """What all steps took so far, those that failed included."""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, command: RunStep, on_layer: OnLayer | None = None) -> None:
        """Run a step; `on_end` is called on the loop's thread when it is over."""
        self._waiting.put(_Step(command, on_layer))

    def busy_s(self) -> float:
        """How long the present step has been running; 0 between steps."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> bool:
        """End the thread after the present step. Blocks for a moment; False if the step does not end."""
        self._waiting.put(None)
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (step := self._waiting.get()) is not None:
            end = self._run(step)
            if end is None:
                return
            try:
                self._loop.call_soon_threadsafe(self._on_end, end)
            except RuntimeError:  # the loop has ended, and with it whoever would want to know
                return

    def _run(self, step: _Step) -> StepDone | StepFailed | None:
        command = step.command
        began = self._began = time.monotonic()
        try:
            results = tuple(self._engine.run(command.sequences, step.on_layer))
        except EngineLost as e:
            log.error("engine_lost", step=command.step, reason=str(e))
            return None
        except Exception as e:
            log.exception("step_failed", step=command.step, sequences=len(command.sequences))
            return StepFailed(command.step, f"{type(e).__name__}: {e}")
        finally:
            self._began = None
            self.engine_s += time.monotonic() - began
        return StepDone(command.step, results, 1, time.monotonic() - began)
