"""The place of packed weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.native.store import ALIGN_BYTES, CHUNK_BYTES, Store  # noqa: E402


def test_tensors_lie_side_by_side_aligned_and_apart() -> None:
    store = Store()
    taken = [store.take((n,), dtype) for n in (1, 7, 100) for dtype in (torch.float32, torch.bfloat16)]
    for i, tensor in enumerate(taken):
        assert tensor.data_ptr() % ALIGN_BYTES == 0
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(taken))
    assert taken[-1].data_ptr() - taken[0].data_ptr() < 1000


def test_what_is_larger_than_a_chunk_has_one_of_its_own() -> None:
    store = Store()
    first = store.take((8,), torch.float32)
    large = store.take((CHUNK_BYTES // 4 + 1,), torch.float32)  # only written pages take memory
    large[-1] = 5.0
    after = store.take((2, 4), torch.float32)
    assert after.shape == (2, 4)
    first.fill_(1.0)
    after.fill_(2.0)
    assert float(large[-1]) == 5.0
    assert not large[:100].any()


def test_memory_outlives_the_store() -> None:
    tensor = Store().take((1000,), torch.float32)
    tensor.fill_(3.0)
    assert float(tensor.sum()) == 3000.0
