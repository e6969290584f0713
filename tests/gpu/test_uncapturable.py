"""A model that cannot be captured. Last of the folder: a capture that fails may leave its mark on torch's allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from structlog.testing import capture_logs  # noqa: E402

from tests.gpu.test_graphs import assert_same, twins_of  # noqa: E402
from tests.support.engine.twins import waits_for_the_device  # noqa: E402


def test_what_cannot_be_captured_is_computed_kernel_by_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_the_device(monkeypatch)
    with capture_logs() as logs:
        twins = twins_of(tmp_path, "Llama")
    assert twins.graphed.captured == ()
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    print(warning["reason"])
    stream = torch.cuda.current_stream()
    assert stream == torch.cuda.default_stream(), "a failed capture left another stream behind"
    assert_same(twins.run([(0, 5, (4,)), (0, 1, (6,))]))
    assert_same(twins.run([(5, 6, (4,)), (1, 2, (6,))]))
