"""One suite over every attention backend that runs here, compared with plain softmax over unpaged keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.attention.api import AttentionShape, Reach  # noqa: E402
from shared.engine.attention.cpu import CpuAttention  # noqa: E402
from shared.engine.attention.native import NativeAttention  # noqa: E402
from shared.engine.attention.reference import ReferenceAttention  # noqa: E402
from tests.support.engine.attention import Bench, new_layers  # noqa: E402
from tests.support.engine.builds import TESTED, loaded  # noqa: E402

NATIVE = [f"native-{name}" for name in TESTED]
BACKENDS = ["torch", "reference", *NATIVE]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
PAGES = 200


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The operators are tiny; a second thread only slows them down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bench(backend: str, shape: AttentionShape, dtype: Any = torch.float32) -> Bench:
    layers = new_layers(shape, PAGES, dtype)
    return Bench(builder(backend)(shape, layers), shape, PAGES, dtype)


def builder(backend: str) -> Any:
    """Builds the backend. Skips the test if this CPU does not support it or a compiler is missing."""
    if not backend.startswith("native-"):
        return {"torch": CpuAttention, "reference": ReferenceAttention}[backend]
    return partial(NativeAttention, kernels=loaded(backend.removeprefix("native-")))


def shape(
    block_tokens: int = 16,
    query_heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    reaches: tuple[Reach, ...] = (),
) -> AttentionShape:
    return AttentionShape(query_heads, kv_heads, head_dim, block_tokens, 0.3, reaches)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


EDGES = [k * 16 + d for k in (1, 2, 3) for d in (-1, 0, 1)]


@pytest.mark.parametrize("length", [1, 2, *EDGES, 100])
def test_whole_prompts_of_every_edge_length(backend: str, length: int) -> None:
    case = bench(backend, shape())
    assert case.worst_error([(case.sequence(length), 0, length)]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("block_tokens", [16, 64, 256])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_page_sizes(backend: str, block_tokens: int, delta: int) -> None:
    case = bench(backend, shape(block_tokens))
    length = block_tokens + delta
    sequence = case.sequence(length + 1)
    assert case.worst_error([(sequence, 0, length)]) < TOLERANCE[torch.float32]
    assert case.worst_error([(sequence, length, length + 1)]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (32, 8)])
def test_head_ratios(backend: str, query_heads: int, kv_heads: int) -> None:
    case = bench(backend, shape(query_heads=query_heads, kv_heads=kv_heads))
    sequence = case.sequence(40)
    for start, end in ((0, 20), (20, 39), (39, 40)):
        assert case.worst_error([(sequence, start, end)]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 64])
def test_chunks_with_everything_before_them_in_pages(backend: str, chunk: int) -> None:
    case = bench(backend, shape())
    length = 70
    sequence = case.sequence(length)
    for start in range(0, length, chunk):
        assert case.worst_error([(sequence, start, min(start + chunk, length))]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 72, 128])
def test_head_dimensions(backend: str, head_dim: int) -> None:
    case = bench(backend, shape(head_dim=head_dim))
    sequence = case.sequence(90)
    for start, end in ((0, 50), (50, 89), (89, 90)):
        assert case.worst_error([(sequence, start, end)]) < 3 * TOLERANCE[torch.float32]


REACHES = {
    "window": Reach(20),
    "window of one": Reach(1),
    "window beyond a tile of keys": Reach(150),
    "cap": Reach(cap=2.0),
    "window and cap": Reach(33, 1.5),
}


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("other", [Reach(), Reach(7)], ids=["plain", "window"])
def test_windows_and_caps_from_layer_to_layer(backend: str, reach: Reach, other: Reach) -> None:
    case = bench(backend, shape(reaches=(reach, other)))
    sequence, short = case.sequence(200), case.sequence(30)
    for start, end in ((0, 100), (100, 180), (180, 183), (183, 184)):
        assert case.worst_error([(sequence, start, end)]) < 2 * TOLERANCE[torch.float32]
    assert case.worst_error([(short, 0, 29), (sequence, 184, 200)]) < 2 * TOLERANCE[torch.float32]


def test_decodes_of_long_contexts_in_every_number_of_threads(backend: str) -> None:
    if backend == "reference":
        pytest.skip("slow on purpose")
    case = bench(backend, shape(block_tokens=64))
    sequences = [case.sequence(n) for n in (257, 513, 1000)]
    for sequence in sequences:
        case.run([(sequence, 0, sequence.queries.shape[1] - 1)])
    last = [(s, s.queries.shape[1] - 1, s.queries.shape[1]) for s in sequences]
    assert case.worst_error(last) < TOLERANCE[torch.float32]
    alone = case.run(last)
    torch.set_num_threads(2)
    together = case.run(last)
    if backend.startswith("native"):
        for one, two in zip(alone, together, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_chunks_larger_than_a_tile_of_queries(backend: str) -> None:
    if backend == "reference":
        pytest.skip("slow on purpose")
    case = bench(backend, shape())
    sequence = case.sequence(700)
    assert case.worst_error([(sequence, 0, 33)]) < TOLERANCE[torch.float32]
    assert case.worst_error([(sequence, 33, 700)]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("reach", [Reach(), Reach(window=40)])
def test_prompts_are_bit_equal_in_every_number_of_threads(backend: str, reach: Reach) -> None:
    """The result must not depend on how the work is split among threads."""
    if not backend.startswith("native"):
        pytest.skip("torch's sums depend on the threads")
    case = bench(backend, shape(reaches=(reach, Reach())))
    parts = [(case.sequence(length), 0, length) for length in (9, 150, 33)]
    one = case.run(parts)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        for alone, together in zip(one, case.run(parts), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_prompts_chunks_and_decodes_in_one_step(backend: str) -> None:
    case = bench(backend, shape())
    old, middle, new = case.sequence(50), case.sequence(60), case.sequence(33)
    case.run([(old, 0, 49)])
    case.run([(middle, 0, 20)])
    assert case.worst_error([(old, 49, 50), (middle, 20, 60), (new, 0, 33)]) < TOLERANCE[torch.float32]


def test_a_batch_of_decodes_is_bit_equal_to_each_alone(backend: str) -> None:
    case = bench(backend, shape())
    sequences = [case.sequence(n) for n in (2, 16, 17, 32, 33, 48, 49, 90)]
    for sequence in sequences:
        case.run([(sequence, 0, sequence.queries.shape[1] - 1)])
    last = [(s, s.queries.shape[1] - 1, s.queries.shape[1]) for s in sequences]
    together = case.run(last)
    for i, part in enumerate(last):
        alone = case.run([part])
        assert all(torch.equal(together[layer][i], alone[layer][0]) for layer in range(len(alone)))


def test_shared_prefix_pages_serve_two_sequences(backend: str) -> None:
    case = bench(backend, shape())
    first = case.sequence(32)
    case.run([(first, 0, 32)])
    other = case.sequence(40)
    shared = type(other)(
        (*first.pages, *other.pages[2:]), other.queries, other.keys.clone(), other.values.clone()
    )
    shared.keys[:, :32] = first.keys
    shared.values[:, :32] = first.values
    assert case.worst_error([(shared, 32, 40)]) < TOLERANCE[torch.float32]


def test_bfloat16(backend: str) -> None:
    case = bench(backend, shape(), torch.bfloat16)
    sequence = case.sequence(60)
    for start, end in ((0, 40), (40, 59), (59, 60)):
        assert case.worst_error([(sequence, start, end)]) < TOLERANCE[torch.bfloat16]


def test_only_the_step_s_rows_are_written(backend: str) -> None:
    layers = new_layers(shape(), PAGES, torch.float32)
    case = Bench(builder(backend)(shape(), layers), shape(), PAGES, torch.float32)
    sequence = case.sequence(20)
    before = [layer.clone() for layer in layers]
    case.run([(sequence, 0, 18)])
    for layer, old in zip(layers, before, strict=True):
        changed = (layer != old).flatten(3).any(3)
        page = torch.zeros_like(changed)
        page[sequence.pages[0]] = True
        page[sequence.pages[1], :, :2] = True
        assert torch.equal(changed, page)
