"""Decode steps over fixed, padded memory: the same logits as without, and no page touched but the step's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from structlog.testing import capture_logs  # noqa: E402

from tests.support.engine.fixed_attention import FixableReference  # noqa: E402
from tests.support.engine.recorded import HostRead, Recorder, as_it_comes  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402
from tests.support.engine.twins import GARBAGE, Twins, waits_for_the_device, worst  # noqa: E402

MOST = 4
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[as_it_comes, Recorder], ids=["as it comes", "recorded"])
def capture(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module", params=list(MODELS))
def captured(request: pytest.FixtureRequest, capture: Any, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    folder = tmp_path_factory.mktemp("model")
    return Twins(save_tiny(folder, request.param, **MODELS[request.param]), capture, FixableReference)


@pytest.fixture
def twins(captured: Twins) -> Twins:
    captured.spoil()
    return captured


def assert_same(pair: tuple[Any, Any]) -> None:
    assert worst(pair) < 1e-4


def test_decoding_over_page_boundaries_in_batches_that_change(twins: Twins) -> None:
    tables = [(3 + 10 * i, 1 + 10 * i, 7 + 10 * i, 4 + 10 * i) for i in range(3)]
    lengths = [3, 1, 6]
    assert_same(twins.run([(0, n, t) for n, t in zip(lengths, tables, strict=True)]))
    for batch in ([0, 1, 2], [0, 1, 2], [2], [0, 2], [1, 0, 2], [1, 0, 2], [0], [2, 1]):
        assert_same(twins.run([(lengths[i], lengths[i] + 1, tables[i]) for i in batch]))
        for i in batch:
            lengths[i] += 1
        assert twins.same_pages()
    assert max(lengths) > 2 * twins.block


def test_prompts_and_batches_beyond_the_largest_are_computed_as_they_come(twins: Twins) -> None:
    tables = [(i,) for i in range(MOST + 1)]
    assert_same(twins.run([(0, 2, (30,)), (0, 1, (31,))]))
    assert_same(twins.run([(0, 1, t) for t in tables]))
    assert_same(twins.run([(1, 2, t) for t in tables[:MOST]]))
    assert twins.same_pages()


def test_capturing_writes_only_the_scrap_page(captured: Twins) -> None:
    for layer in captured.as_captured:
        assert bool((layer[: captured.pages] == GARBAGE).all())
        assert bool((layer[captured.scrap, :, 0] != GARBAGE).any())


def test_padding_writes_only_the_scrap_page(twins: Twins) -> None:
    twins.run([(0, 1, (5,)), (0, 1, (9,)), (0, 1, (2,))])
    assert twins.touched() == [{5, 9, 2}] * len(twins.layers)
    for layer in twins.layers:
        assert bool((layer[[5, 9, 2], :, 1:] == GARBAGE).all())


def test_layers_are_told_of_in_order(twins: Twins) -> None:
    told: list[int] = []
    twins.run([(0, 1, (5,))], told)
    assert told == list(range(len(twins.layers)))


def test_logits_outlive_the_next_step(twins: Twins) -> None:
    first, _ = twins.run([(0, 1, (5,)), (0, 1, (6,))])
    before = first.clone()
    twins.run([(1, 2, (5,)), (1, 2, (6,))])
    assert torch.equal(first, before)


def test_the_largest_is_captured_first_and_progress_told(tmp_path: Path) -> None:
    twins = Twins(save_tiny(tmp_path), as_it_comes, FixableReference)
    assert twins.backend.made == [4, 2, 1]
    assert twins.graphed.captured == (1, 2, 4)
    assert twins.progress == [0.0, 1 / 3, 2 / 3]


class Failing(Recorder):
    """Captures as a device without memory, or with another fault, would."""

    errors: tuple[BaseException | None, ...] = ()

    def __call__(self, step: Any) -> Any:
        error = self.errors[len(self.recordings)] if len(self.recordings) < len(self.errors) else None
        replay = super().__call__(step)
        if error is not None:
            raise error
        return replay


def failing(*errors: BaseException | None) -> type[Failing]:
    return type("Failing", (Failing,), {"errors": errors})


@pytest.mark.parametrize(
    ("errors", "captured"),
    [
        ((torch.OutOfMemoryError("no room"),), (1, 2)),
        ((torch.OutOfMemoryError("no room"), torch.OutOfMemoryError("nor here")), (1,)),
        ((torch.AcceleratorError("CUDA error: out of memory; no room for a pinned buffer"),), (1, 2)),
        ((RuntimeError("Buffer overflow: no room for batch_prefill_tmp_v"),), (1, 2)),
        ((RuntimeError("no room for a lazy kernel"),), ()),
        ((None, ValueError("no such kernel: room")), (4,)),
    ],
)
def test_what_cannot_be_captured_is_warned_of_once_and_computed_as_it_comes(
    errors: tuple[BaseException | None, ...], captured: tuple[int, ...], tmp_path: Path
) -> None:
    with capture_logs() as logs:
        twins = Twins(save_tiny(tmp_path), failing(*errors), FixableReference)
    assert twins.graphed.captured == captured
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert "room" in warning["reason"]
    assert warning["captured"] == list(captured)
    assert_same(twins.run([(0, 1, (4,)), (0, 1, (6,)), (0, 1, (7,))]))
    assert_same(twins.run([(1, 2, (4,)), (1, 2, (6,)), (1, 2, (7,))]))
    assert twins.same_pages()


def test_a_model_that_waits_for_the_device_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_the_device(monkeypatch)
    with capture_logs() as logs:
        twins = Twins(save_tiny(tmp_path), Recorder, FixableReference)
    assert twins.graphed.captured == ()
    assert HostRead.__name__ in logs[0]["reason"]
    assert_same(twins.run([(0, 1, (4,))]))


def test_a_recording_keeps_what_a_step_read_from_the_host() -> None:
    """That the recorder of these tests would show a step that is not wholly in fixed memory."""
    number, told = torch.zeros(1), {"by": 1.0}

    def step() -> None:
        number.add_(told["by"])

    replay = Recorder(torch.device("cpu"))(step)
    number.zero_()
    told["by"] = 5.0
    replay()
    assert float(number) == 1.0
