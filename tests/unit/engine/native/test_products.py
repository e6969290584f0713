"""The kernels' matrix products against torch's, and the law that a row does not depend on its neighbours."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.native.kernels import Kernels, sound  # noqa: E402
from shared.engine.native.store import Store  # noqa: E402
from tests.support.engine.builds import TESTED, loaded  # noqa: E402

SHAPES = [(16, 8), (33, 30), (64, 600), (100, 1300), (200, 64), (1, 2)]
"""(outputs, inputs): whole panels and not, inputs of one depth and of several."""


@pytest.fixture(params=TESTED)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return loaded(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return getattr(torch, request.param)


def product(kernels: Kernels, x: Any, weights: Any, threads: int = 1, norm: Any = None) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return kernels.product(x, kernels.pack(weights, Store()), len(weights), norm, 1e-5)
    finally:
        torch.set_num_threads(before)


def inputs(rows: int, outputs: int, inputs: int, dtype: Any) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(rows * 1000 + outputs)
    weights = torch.randn(outputs, inputs, generator=random).to(dtype)
    return torch.randn(rows, inputs, generator=random), weights


@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 12, 13, 40, 200])
def test_equals_torch(kernels: Kernels, dtype: Any, rows: int, outputs: int, depth: int) -> None:
    x, weights = inputs(rows, outputs, depth, dtype)
    if kernels.has_pairs and dtype == torch.bfloat16:
        x = x.to(dtype).float()
    expected = x.double() @ weights.double().T
    error = (product(kernels, x, weights) - expected).abs().max()
    assert error < 2e-6 * depth**0.5 * 4


@pytest.mark.parametrize(("outputs", "depth"), [(33, 30), (100, 1300)])
def test_a_row_is_the_same_beside_any_others_and_with_any_threads(
    kernels: Kernels, dtype: Any, outputs: int, depth: int
) -> None:
    x, weights = inputs(41, outputs, depth, dtype)
    whole = product(kernels, x, weights)
    for first, last in ((0, 1), (3, 8), (20, 41), (40, 41)):
        for threads in (1, 2):
            assert torch.equal(
                product(kernels, x[first:last].contiguous(), weights, threads), whole[first:last]
            )


def test_the_norm_before_it(kernels: Kernels) -> None:
    x, weights = inputs(9, 50, 70, torch.float32)
    norm = torch.rand(70)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm
    assert torch.allclose(product(kernels, x, weights, norm=norm), normed @ weights.T, atol=1e-4)


def test_a_bad_number_stays_in_its_row(kernels: Kernels, dtype: Any) -> None:
    x, weights = inputs(8, 40, 64, dtype)
    x[3, 5] = float("nan")
    y = product(kernels, x, weights)
    assert y[3].isnan().all()
    assert not y[[0, 1, 2, 4, 5, 6, 7]].isnan().any()


def test_the_build_is_sound_and_one_that_computes_something_else_is_not(kernels: Kernels) -> None:
    assert sound(kernels)

    class Wrong(Kernels, frozen=True):
        def product(self, x: Any, packed: Any, outputs: int, norm: Any = None, epsilon: float = 0.0) -> Any:
            return super().product(x, packed, outputs, norm, epsilon).roll(1, 0)

    assert not sound(Wrong(kernels.build, kernels.lib, kernels.panel, kernels.has_pairs))
