"""Decode attention for captured steps, with FlashInfer's real wrappers around kernels that only note what they are given.

Needs no GPU: all that runs is the wrappers' own Python, on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (extra `gpu`)")

from shared.engine.attention.api import AttentionBackend, AttentionBatch, AttentionShape, Reach, Span  # noqa: E402
from shared.engine.attention.flashinfer import FlashInferAttention  # noqa: E402
from shared.engine.graphs.sizes import padded  # noqa: E402

ROWS, PAGES, SCRAP = 4, 40, 39
FIRST = AttentionBatch((Span(48, 49, (9, 8, 6, 5), 0), Span(15, 16, (3,), 1)))
SECOND = AttentionBatch(
    (Span(16, 17, (3, 7), 0), Span(0, 1, (2,), 1), Span(99, 100, (11, 12, 13, 14, 15, 16, 17), 2))
)


class Kernels:
    """In the place of all kernels."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []
        self.appended: list[dict[str, Any]] = []

    def module(self, *key: Any) -> Any:
        return SimpleNamespace(plan=self._plan, run=self._run, paged_run=self._run)

    def _plan(self, *args: Any) -> list[int]:
        self.planned.append(args)
        return [0]

    def _run(self, *args: Any) -> None:
        self.ran.append(args)

    def memory(self) -> list[set[int]]:
        """Of each run: where the integers lay that it was given, page tables and schedules."""
        kinds = (torch.int32, torch.uint8)
        return [
            {x.data_ptr() for x in args if isinstance(x, torch.Tensor) and x.dtype in kinds}
            for args in self.ran
        ]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels, decode = Kernels(), flashinfer.decode
    for name in ("get_batch_decode_module", "get_batch_prefill_module"):
        if not hasattr(decode, name):
            pytest.skip(f"this FlashInfer has no {name} to replace")
        monkeypatch.setattr(decode, name, kernels.module)
    answers = {
        "get_compute_capability": (9, 0),
        "determine_attention_backend": "fa2",
        "device_support_pdl": False,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(decode, name, lambda *args, answer=answer, **named: answer, raising=False)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **named: real(*args, **named))
    return kernels


@pytest.fixture(params=[9, 12], ids=["cuda cores", "tensor cores"])
def attention(request: pytest.FixtureRequest, kernels: Kernels) -> FlashInferAttention:
    shape = AttentionShape(request.param, 3, 64, 16, 0.125, (Reach(24), Reach(), Reach(0, 50.0)))
    layers = [torch.zeros(PAGES, 2, 16, 3, 64, dtype=torch.bfloat16)] * 3
    return FlashInferAttention(shape, layers)


def run(attention: AttentionBackend, rows: int, heads: int) -> None:
    for layer in range(3):
        attention.run(layer, torch.zeros(rows, heads, 64, dtype=torch.bfloat16))


def test_plans_are_told_the_padded_step(attention: FlashInferAttention, kernels: Kernels) -> None:
    fixed = attention.fixed(ROWS, 8)
    fixed.plan(padded(FIRST, ROWS, SCRAP))
    assert len(kernels.planned) == 3
    for args in kernels.planned:
        tables = [x.tolist() for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
        assert [0, 4, 5, 6, 7] in tables
        assert any(x is True for x in args), "the wrapper is in its CUDA graph mode"
        assert all(x.device.type == "cpu" for x in args if isinstance(x, torch.Tensor))


def test_runs_after_any_plan_read_the_same_memory(attention: FlashInferAttention, kernels: Kernels) -> None:
    fixed, heads = attention.fixed(ROWS, 8), attention._shape.query_heads
    fixed.plan(padded(FIRST, ROWS, SCRAP))
    run(fixed, ROWS, heads)
    before = kernels.memory()
    kernels.ran.clear()
    fixed.plan(padded(SECOND, ROWS, SCRAP))
    run(fixed, ROWS, heads)
    assert kernels.memory() == before
    assert all(len(memory) >= 5 for memory in before)
    tables = [x.tolist() for x in kernels.ran[0] if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
    assert [0, 2, 3, 10, 11] in tables
    assert [1, 1, 4, 1] in tables
    assert [3, 7, 2, 11, 12, 13, 14, 15, 16, 17, SCRAP] in [table[:11] for table in tables]


def test_the_append_reads_the_wrappers_tables(
    attention: FlashInferAttention, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flashinfer, "append_paged_kv_cache", lambda *args: calls.append(args))
    fixed = attention.fixed(ROWS, 8)
    keys = torch.zeros(ROWS, 3, 64, dtype=torch.bfloat16)
    for batch in (FIRST, SECOND):
        fixed.plan(padded(batch, ROWS, SCRAP))
        fixed.append(0, keys, keys)
    first, second = ([x.data_ptr() for x in args if isinstance(x, torch.Tensor)] for args in calls)
    assert first == second
    _, _, rows, positions, _, indices, indptr, last_page, layout = calls[-1]
    assert rows.tolist() == [0, 1, 2, 3]
    assert positions.tolist() == [16, 0, 99, 0]
    assert indptr.tolist() == [0, 2, 3, 10, 11]
    assert last_page.tolist() == [1, 1, 4, 1]
    assert indices[indptr[3]].item() == SCRAP
    assert layout == "NHD"
    run(fixed, ROWS, attention._shape.query_heads)
    assert {indices.data_ptr(), indptr.data_ptr(), last_page.data_ptr()} <= kernels.memory()[0]


def test_the_largest_step_fits(attention: FlashInferAttention, kernels: Kernels) -> None:
    fixed = attention.fixed(2, 20)
    pages = tuple(range(20))
    fixed.plan(AttentionBatch((Span(319, 320, pages, 0), Span(319, 320, pages, 1))))
    with pytest.raises(ValueError, match="indices"):
        fixed.plan(AttentionBatch((Span(335, 336, (*pages, 30), 0), Span(319, 320, pages, 1))))


def test_another_number_of_rows_is_refused(attention: FlashInferAttention, kernels: Kernels) -> None:
    fixed = attention.fixed(ROWS, 8)
    with pytest.raises(ValueError, match="batch size"):
        fixed.plan(SECOND)
