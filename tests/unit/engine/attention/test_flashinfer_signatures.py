"""Every call into FlashInfer binds to the signatures of the installed package. Needs no GPU: nothing is computed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (extra `gpu`)")

from msgspec.structs import replace  # noqa: E402

from shared.engine.attention.api import AttentionBackend, AttentionBatch, AttentionShape, Reach, Span  # noqa: E402
from shared.engine.attention.flashinfer import FlashInferAttention  # noqa: E402
from shared.engine.graphs.sizes import padded  # noqa: E402
from shared.protocol.errors import Invalid  # noqa: E402

SHAPE = AttentionShape(query_heads=9, kv_heads=3, head_dim=64, block_tokens=16, scale=0.125)
PROMPT = Span(0, 20, (4, 7), 0)
CHUNK = Span(16, 40, (1, 2, 3), 20)
DECODE = Span(48, 49, (9, 8, 6, 5), 0)


class Bound:
    """A call that fitted the real signature."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name = name
        self.arguments = arguments


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """Replace what would need a GPU by a check of its arguments. Keyword arguments that a method passes on unseen
    (`**kwargs`) are checked against the method that takes them."""
    made: list[Bound] = []

    def watch(
        owner: Any, name: str, inner: str = "", result: Callable[..., Any] = lambda *a, **k: None
    ) -> None:
        real = getattr(owner, name)
        signatures = [inspect.signature(real)]
        if inner and hasattr(owner, inner):
            signatures.append(inspect.signature(getattr(owner, inner)))

        def call(*args: Any, **kwargs: Any) -> Any:
            for signature in signatures:
                bound = signature.bind(*args, **kwargs)
            made.append(Bound(f"{getattr(owner, '__name__', owner)}.{name}", bound.arguments))
            return result(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for wrapper in (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
    ):
        watch(wrapper, "__init__")
        watch(wrapper, "plan", inner="_plan_impl")
        watch(wrapper, "run", result=lambda self, queries, *a, **k: queries)
    watch(flashinfer, "append_paged_kv_cache")
    return made


def test_a_step_of_prompts_and_chunks(calls: list[Bound]) -> None:
    attention = backend()
    attention.plan(AttentionBatch((PROMPT, CHUNK)))
    forward(attention, 44)
    assert [c.name.rpartition(".")[2] for c in calls[2:]] == ["plan", "append_paged_kv_cache", "run"]
    plan = calls[2].arguments
    assert calls[2].name.startswith("BatchPrefill")
    assert plan["qo_indptr"].tolist() == [0, 20, 44]
    assert plan["paged_kv_indptr"].tolist() == [0, 2, 5]
    assert plan["paged_kv_indices"].tolist() == [4, 7, 1, 2, 3]
    assert plan["paged_kv_last_page_len"].tolist() == [4, 8]
    assert plan["causal"] is True
    assert (plan["num_qo_heads"], plan["num_kv_heads"], plan["page_size"]) == (9, 3, 16)
    append = calls[3].arguments
    assert append["positions"].tolist() == [*range(20), *range(16, 40)]
    assert append["batch_indices"].tolist() == [0] * 20 + [1] * 24
    assert append["kv_layout"] == "NHD"


def test_a_step_of_decodes(calls: list[Bound]) -> None:
    attention = backend()
    attention.plan(AttentionBatch((DECODE, Span(15, 16, (0,), 1))))
    forward(attention, 2)
    plan = calls[2].arguments
    assert calls[2].name.startswith("BatchDecode")
    assert plan["indptr"].tolist() == [0, 4, 5]
    assert plan["last_page_len"].tolist() == [1, 16]
    assert plan["sm_scale"] == 0.125
    assert plan["q_data_type"] is torch.bfloat16


@pytest.mark.parametrize("span", [CHUNK, DECODE], ids=["prefill", "decode"])
def test_layers_that_see_differently_far_are_planned_apart(calls: list[Bound], span: Span) -> None:
    attention = backend(Reach(24), Reach(), Reach(24), Reach(0, 50.0))
    attention.plan(AttentionBatch((Span(span.start, span.end, span.pages, 0),)))
    plans = [c.arguments for c in calls if c.name.endswith(".plan")]
    assert [(p.get("window_left", -1), p.get("logits_soft_cap")) for p in plans] == [
        (23, None), (-1, None), (-1, 50.0),
    ]  # fmt: skip
    for layer in range(4):
        forward(attention, span.tokens, layer)


def test_a_step_for_a_capture(calls: list[Bound]) -> None:
    attention = backend().fixed(4, 8)
    made = calls[-1].arguments
    assert calls[-1].name.startswith("BatchDecode")
    assert made["use_cuda_graph"] is True
    assert len(made["paged_kv_last_page_len_buffer"]) == 4
    attention.plan(padded(AttentionBatch((DECODE,)), 4, 7))
    forward(attention, 4)
    assert [c.name.rpartition(".")[2] for c in calls[-3:]] == ["plan", "append_paged_kv_cache", "run"]
    assert calls[-3].arguments["indptr"].tolist() == [0, 4, 5, 6, 7]
    assert calls[-2].arguments["kv_indices"] is made["paged_kv_indices_buffer"]


def backend(*reaches: Reach) -> FlashInferAttention:
    pages = torch.zeros(10, 2, 16, 3, 64, dtype=torch.bfloat16)
    return FlashInferAttention(replace(SHAPE, reaches=reaches), [pages] * max(1, len(reaches)))


def forward(attention: AttentionBackend, tokens: int, layer: int = 0) -> None:
    keys = torch.zeros(tokens, 3, 64, dtype=torch.bfloat16)
    attention.append(layer, keys, keys)
    queries = torch.zeros(tokens, 9, 64, dtype=torch.bfloat16)
    assert attention.run(layer, queries).shape == queries.shape


def test_heads_that_it_has_no_kernels_for_are_refused_by_name() -> None:
    shape = replace(SHAPE, head_dim=96)
    with pytest.raises(Invalid, match="heads of 96") as caught:
        FlashInferAttention(shape, [torch.zeros(2, 2, 16, 3, 96)])
    assert caught.value.param == "model"
