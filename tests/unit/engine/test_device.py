"""Beside a device that computes: errors, memory, and kernels that are compiled at their first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.core.worker.steps import SequenceStep  # noqa: E402
from shared.engine import device  # noqa: E402
from shared.engine.api import EngineConfig, EngineLost  # noqa: E402
from shared.engine.attention.cpu import CpuAttention  # noqa: E402
from shared.engine.hardware import Hardware  # noqa: E402
from shared.engine.model import ModelEngine  # noqa: E402
from shared.protocol.errors import Invalid  # noqa: E402
from shared.protocol.sampling import SamplingParams  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402


class Failing(CpuAttention):
    error: Exception | None = None

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().run(layer, queries)


def test_a_device_that_failed_loses_the_engine_and_a_step_that_failed_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(save_tiny(tmp_path)), kv_bytes=8 << 20, threads=1)
    hardware = Hardware(torch.device("cpu"), "float32", Failing)
    engine = ModelEngine.load(config, lambda stage, done: None, hardware)
    step = SequenceStep("a", 0, 1, bytes(4), (0,), SamplingParams(temperature=0.0))
    waited: list[str] = []

    def broken(device: torch.device) -> None:
        raise torch.AcceleratorError("an illegal memory access")

    try:
        monkeypatch.setattr(Failing, "error", RuntimeError("a kernel failed"))
        monkeypatch.setattr(device, "wait_for", lambda device: waited.append(device.type))
        with pytest.raises(RuntimeError, match="a kernel failed"):
            engine.run([step])
        assert waited == ["cpu"]
        assert engine.fault() == ""
        monkeypatch.setattr(device, "wait_for", broken)
        with pytest.raises(EngineLost, match="an illegal memory access"):
            engine.run([step])
        assert "an illegal memory access" in engine.fault()
    finally:
        engine.close()


def test_too_little_memory_is_told_by_the_setting_that_asks_for_it() -> None:
    with (
        pytest.raises(Invalid, match="no memory for the KV: 3 GiB") as caught,
        device.needs_memory("the KV", "kv_bytes"),
    ):
        raise torch.OutOfMemoryError("3 GiB")
    assert caught.value.param == "kv_bytes"


def test_prompts_are_computed_first_where_kernels_are_compiled_at_their_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    real = ModelEngine.run

    def run(self: ModelEngine, sequences: Any, on_layer: Any = None) -> Any:
        ran.extend(sequence.tokens for sequence in sequences)
        return real(self, sequences, on_layer)

    monkeypatch.setattr(ModelEngine, "run", run)
    hardware = Hardware(torch.device("cpu"), "float32", CpuAttention, first_prompts=(2, 128, 10**6))
    config = EngineConfig(str(save_tiny(tmp_path)), kv_bytes=8 << 20, threads=1)
    engine = ModelEngine.load(config, lambda stage, done: None, hardware)
    context = engine.spec.context_tokens
    engine.close()
    assert ran[:3] == [1, 2, 128]
    assert 128 < ran[3] <= context
