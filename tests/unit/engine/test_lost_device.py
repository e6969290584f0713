"""A device that failed fails every later call: the engine says that it is lost, so that a new process takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.core.steps import SequenceStep  # noqa: E402
from shared.engine.api import EngineConfig, EngineLost  # noqa: E402
from shared.engine.attention.cpu import CpuAttention  # noqa: E402
from shared.engine.hardware import Hardware  # noqa: E402
from shared.engine.model import ModelEngine  # noqa: E402
from shared.protocol.sampling import SamplingParams  # noqa: E402
from tests.support.tiny import save_tiny  # noqa: E402


class Failing(CpuAttention):
    error: Exception | None = None

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().run(layer, queries)


def test_an_error_of_the_device_loses_the_engine_and_one_of_a_step_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(save_tiny(tmp_path)), kv_bytes=8 << 20, threads=1)
    hardware = Hardware(torch.device("cpu"), "float32", Failing)
    engine = ModelEngine.load(config, lambda stage, done: None, hardware)
    step = SequenceStep("a", 0, 1, bytes(4), (0,), SamplingParams(temperature=0.0))
    try:
        monkeypatch.setattr(Failing, "error", RuntimeError("a shape is wrong"))
        with pytest.raises(RuntimeError, match="a shape is wrong"):
            engine.run([step])
        assert engine.fault() == ""
        monkeypatch.setattr(Failing, "error", torch.AcceleratorError("an illegal memory access"))
        with pytest.raises(EngineLost, match="an illegal memory access"):
            engine.run([step])
        assert "an illegal memory access" in engine.fault()
    finally:
        engine.close()
