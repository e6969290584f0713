"""The copy stream beside the computing: who waits for whom."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.staging.lanes import CudaLane, HostLane, lane_beside  # noqa: E402
from tests.support.fakes.fake_cuda import FakeCuda  # noqa: E402

DEVICE = torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_copies_wait_for_what_was_computed_and_nothing_waits_for_them(cuda: FakeCuda) -> None:
    lane = CudaLane(DEVICE)
    cuda.note("layer 0")
    lane.submit(lambda: cuda.note("copy 0"))
    cuda.note("layer 1")
    assert cuda.log == [
        "layer 0 on main",
        "side 1 waits for main",
        "copy 0 on side 1",
        "event 3 on side 1",
        "layer 1 on main",
    ]


def test_computing_waits_for_what_was_loaded_and_this_thread_does_not(cuda: FakeCuda) -> None:
    lane = CudaLane(DEVICE)
    mark = lane.submit(lambda: cuda.note("load"))
    lane.precede_computing(mark)
    assert cuda.log[-1] == "main waits for event 2 on side 1"
    assert not mark.over()
    mark.wait()
    assert cuda.log[-1] == "wait for event 2 on side 1"


def test_which_lane_runs_beside_a_device(cuda: FakeCuda) -> None:
    assert isinstance(lane_beside(DEVICE), CudaLane)
    assert isinstance(lane_beside(torch.device("cpu")), HostLane)
