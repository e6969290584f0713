"""What times on a GPU are compared with computes the right thing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.attention.api import AttentionShape  # noqa: E402
from tests.support.engine.attention import Bench, new_layers  # noqa: E402
from tests.support.engine.sdpa_pages import SdpaPages  # noqa: E402


def test_prompts_and_decode_steps() -> None:
    shape = AttentionShape(6, 2, 8, 4, 0.35)
    bench = Bench(SdpaPages(shape, new_layers(shape, 40, torch.float32)), shape, 40, torch.float32)
    sequences = [bench.sequence(18) for _ in range(3)]
    assert bench.worst_error([(s, 0, 17) for s in sequences]) < 1e-5
    assert bench.worst_error([(s, 17, 18) for s in sequences]) < 1e-5
