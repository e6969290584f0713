"""In which order a capture asks things of CUDA, and how one that fails is left."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.graphs.capture import CudaCapture  # noqa: E402
from tests.support.fakes.fake_cuda import FakeCuda  # noqa: E402

DEVICE = torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_step_is_warmed_up_beside_and_captured_there(cuda: FakeCuda) -> None:
    replay = CudaCapture(DEVICE)(lambda: cuda.note("step"))
    assert cuda.log == [
        "side 1 waits for main",
        "step on side 1",
        "step on side 1",
        "capture begins",
        "step on side 1",
        "capture ends",
        "main waits for side 1",
    ]
    replay()
    assert cuda.log[-1] == "replay"
    assert cuda.current is cuda.main


def test_all_captures_share_a_pool_and_a_stream(cuda: FakeCuda) -> None:
    capture = CudaCapture(DEVICE)
    capture(lambda: None)
    capture(lambda: None)
    first, second = cuda.graph_arguments
    assert first == second
    assert (first["pool"], first["capture_error_mode"]) == ("the pool", "thread_local")


@pytest.mark.parametrize("at", [1, 3])
def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_the_device_idle(
    cuda: FakeCuda, at: int
) -> None:
    runs = 0

    def step() -> None:
        nonlocal runs
        runs += 1
        if runs == at:
            raise ValueError("no such kernel")

    with pytest.raises((ValueError, RuntimeError)) as caught:
        CudaCapture(DEVICE)(step)
    assert cuda.current is cuda.main
    assert cuda.log[-1] == "synchronize"
    assert "no such kernel" in f"{caught.value} {caught.value.__context__}"
