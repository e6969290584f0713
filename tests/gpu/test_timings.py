"""Times, printed and not judged: decode steps with and without graphs, and FlashInfer beside torch on the same pages.

`pytest tests/gpu/test_timings.py -s`
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.core.kv.block_keys import blocks_for  # noqa: E402
from shared.engine.attention.api import AttentionBackend, AttentionBatch, AttentionShape, Span  # noqa: E402
from shared.engine.graphs.capture import CudaCapture  # noqa: E402
from tests.support.engine.sdpa_pages import SdpaPages  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402
from tests.support.engine.twins import Twins  # noqa: E402

CONTEXT_TOKENS = 512
REPEATS = 20
SHAPE = AttentionShape(32, 8, 128, 16, 128**-0.5)


def median_ms(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def batch_of(sequences: int, start: int, end: int) -> AttentionBatch:
    each, tokens = blocks_for(end, SHAPE.block_tokens), end - start
    return AttentionBatch(
        tuple(Span(start, end, tuple(range(i * each, (i + 1) * each)), i * tokens) for i in range(sequences))
    )


def test_decode_steps_with_and_without_graphs(tmp_path: Path) -> None:
    from shared.engine.attention.flashinfer import FlashInferAttention

    folder = save_tiny(
        tmp_path,
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        initializer_range=0.02,
    )
    pages = 32 * blocks_for(CONTEXT_TOKENS + 1, 16)
    began = torch.cuda.memory_allocated()
    twins = Twins(
        folder,
        CudaCapture,
        FlashInferAttention,
        most=32,
        pages=pages,
        block=16,
        device="cuda",
        dtype=torch.bfloat16,
    )
    print(
        f"\n{torch.cuda.get_device_name()}; 16 layers of 1024, {(torch.cuda.memory_allocated() - began) >> 20} MiB"
    )
    assert twins.graphed.captured == (1, 2, 4, 8, 12, 16, 24, 32)
    for sequences in (1, 4, 16, 32):
        step = (
            batch_of(sequences, CONTEXT_TOKENS, CONTEXT_TOKENS + 1),
            torch.arange(sequences),
            torch.arange(sequences),
        )
        with torch.inference_mode():
            graph, plain = (
                median_ms(partial(path.logits, *step, None)) for path in (twins.graphed, twins.plain)
            )
        print(
            f"decode step, {sequences:2} sequences of {CONTEXT_TOKENS}: {graph:.3f} ms captured, {plain:.3f} ms not"
        )


@pytest.mark.parametrize(
    ("what", "sequences", "start", "end"),
    [("decode", b, CONTEXT_TOKENS, CONTEXT_TOKENS + 1) for b in (1, 4, 16, 32)]
    + [("prefill", 1, 0, n) for n in (128, 512, 2048, 6000)],
)
def test_attention_beside_torch_on_the_same_pages(what: str, sequences: int, start: int, end: int) -> None:
    from shared.engine.attention.flashinfer import FlashInferAttention

    batch = batch_of(sequences, start, end)
    pages = sequences * blocks_for(end, SHAPE.block_tokens)
    layer = torch.randn(pages, 2, 16, SHAPE.kv_heads, SHAPE.head_dim, dtype=torch.bfloat16, device="cuda")
    queries = torch.randn(
        batch.tokens, SHAPE.query_heads, SHAPE.head_dim, dtype=torch.bfloat16, device="cuda"
    )
    keys, values = (
        torch.randn(batch.tokens, SHAPE.kv_heads, SHAPE.head_dim, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    backends: list[AttentionBackend] = [FlashInferAttention(SHAPE, [layer]), SdpaPages(SHAPE, [layer])]
    outputs, times = [], []
    for backend in backends:
        backend.plan(batch)

        def work(backend: AttentionBackend = backend) -> torch.Tensor:
            backend.append(0, keys, values)
            return backend.run(0, queries)

        outputs.append(work())
        times.append(median_ms(work))
    assert float((outputs[0] - outputs[1]).abs().max()) < 5e-2
    print(f"\n{what}, {sequences} x {end}: {times[0]:.3f} ms FlashInfer, {times[1]:.3f} ms torch SDPA")
