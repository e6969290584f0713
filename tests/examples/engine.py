"""An engine: the toy's tokens at the pace of other hardware, to try a cluster of such nodes on a laptop.

An engine over a runtime of your own has the same four parts: `spec`, `store`, `run`, `fault`.

tsukimi up --model toy --set decode.engine=tests.examples.engine:PacedEngine
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.engine.api import Engine, EngineConfig
from shared.engine.toy.engine import ToyEngine


class PacedEngine:
    """Implements engine.api.Engine. A step takes at least `step_s`, and `token_s` for each token it computes."""

    step_s = 0.002
    token_s = 0.00001

    def __init__(self, runtime: Engine) -> None:
        self._runtime = runtime
        self.spec = runtime.spec
        self.store = runtime.store

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[str, float], None]) -> PacedEngine:
        """Blocks until the engine can run. `progress` says what is being done, and which fraction of it is."""
        runtime = ToyEngine(config, lambda done, total: progress("touching the KV pages", done / total))
        return cls(runtime)

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        began = time.monotonic()
        results = self._runtime.run(sequences, on_layer)
        due = began + self.step_s + self.token_s * sum(s.tokens for s in sequences)
        time.sleep(max(0.0, due - time.monotonic()))
        return results

    def fault(self) -> str:
        return self._runtime.fault()

    def close(self) -> None:
        self._runtime.close()
