"""The kernels' threads: more than there are CPUs, called from several places at once, and after a fork."""

from __future__ import annotations

import multiprocessing as mp
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.native.kernels import Kernels, kernels  # noqa: E402
from shared.engine.native.store import Store  # noqa: E402

ROUNDS = 200


class Work:
    """A product by so many threads, and what comes of it."""

    def __init__(self, built: Kernels, threads: int, rows: int = 3) -> None:
        random = torch.Generator().manual_seed(threads)
        weights = torch.randn(300, 70, generator=random)
        self._kernels, self._threads = built, threads
        self._x = torch.randn(rows, 70, generator=random)
        self._packed = built.pack(weights, Store())
        self.expected = self.result()
        assert torch.allclose(self.expected, self._x @ weights.T, atol=1e-4)

    def result(self) -> Any:
        y = torch.empty(len(self._x), 300)
        inputs = torch.empty_like(self._x)
        self._kernels.lib.tsukimi_head(
            self._threads, 0, self._x.data_ptr(), 0, 0.0, len(self._x), 70, self._packed.data_ptr(), 300,
            inputs.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def again(self, rounds: int = ROUNDS) -> int:
        """How often the same came out."""
        return sum(bool(torch.equal(self.result(), self.expected)) for _ in range(rounds))


@pytest.fixture
def built() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("no kernels could be built here")
    return found


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_any_number_of_threads_computes_the_same_every_time(built: Kernels, threads: int) -> None:
    assert Work(built, threads).again() == ROUNDS


def test_callers_take_turns(built: Kernels) -> None:
    works = [Work(built, threads) for threads in (1, 2, 4, 3)]
    with ThreadPoolExecutor(len(works)) as pool:
        assert list(pool.map(Work.again, works)) == [ROUNDS] * len(works)


def _in_child(work: Work, pipe: Any) -> None:
    pipe.send(work.again(5))


def test_a_forked_child_has_threads_of_its_own(built: Kernels) -> None:
    work = Work(built, 3)
    here, there = mp.get_context("fork").Pipe()
    child = mp.get_context("fork").Process(target=_in_child, args=(work, there))
    child.start()
    try:
        assert here.poll(20), "the child computes nothing"
        assert here.recv() == 5
    finally:
        child.kill()
        child.join()
    assert work.again(5) == 5
