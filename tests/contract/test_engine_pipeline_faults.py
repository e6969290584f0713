"""A group of stages fails as a whole and leaves no process behind. A model that can't be split is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.api import EngineLost  # noqa: E402
from shared.engine.native.kernels import kernels  # noqa: E402
from shared.engine.pipeline import children as children_module  # noqa: E402
from shared.engine.pipeline import group  # noqa: E402
from shared.engine.pipeline.messages import Setup  # noqa: E402
from shared.protocol.errors import Invalid  # noqa: E402
from tests.support.engine.sequences import Sequences  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402
from tests.support.processes.stages import MB, children, load  # noqa: E402
from tests.support.until import until  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(kernels() is None, reason="the kernels cannot be built here"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model deep enough that neighbouring stages overlap: they have some layers in common."""
    return save_tiny(tmp_path_factory.mktemp("deeper"), num_hidden_layers=15)


def tokens(length: int) -> list[int]:
    return [7 + i % 200 for i in range(length)]


@pytest.mark.parametrize("model", ["tiny", "deeper"])
def test_a_step_whose_layers_nobody_wants_to_hear_of_is_void_and_the_next_one_is_right(
    model: str, request: pytest.FixtureRequest
) -> None:
    engine = load(request.getfixturevalue(model), 3, 64 * MB)
    run = Sequences(engine)
    expected = run.prefill(tokens(600), run.pages(600)).tokens
    all_layers = list(range(engine.spec.layout.layers))
    for bad_layer in all_layers:

        def on_layer(layer: int, bad_layer: int = bad_layer) -> None:
            if layer == bad_layer:
                raise OSError("nobody listens")

        pages = run.pages(600)
        with pytest.raises(OSError, match="nobody listens"):
            run.prefill(tokens(600), pages, on_layer=on_layer)
        layers: list[int] = []
        assert run.prefill(tokens(600), pages, on_layer=layers.append).tokens == expected
        assert layers == all_layers
    assert engine.fault() == ""
    engine.close()


def test_the_stage_that_cannot_load_is_named(
    deeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the stage that failed, not its neighbour, which is still loading at that time."""
    slow = save_tiny(tmp_path, num_hidden_layers=15, intermediate_size=60_000)

    def start(setups: list[Setup], memory_fd: int) -> Any:
        changed = [replace(setups[0], folder=str(slow)), replace(setups[1], pages=1 << 40)]
        return children_module.start(changed, memory_fd)

    monkeypatch.setattr(group, "start", start)
    with pytest.raises(EngineLost, match=r"stage 2 did not start \(exit code 1\)"):
        load(deeper, 3, 32 * MB)
    assert not children()


async def test_when_a_stage_is_killed_the_engine_says_so_and_the_other_stages_end(tiny: Path) -> None:
    engine = load(tiny, 3)
    run = Sequences(engine)
    run.prefill(tokens(50), run.pages(50))
    first, second = children()
    os.kill(second.pid, signal.SIGKILL)
    await until(lambda: bool(engine.fault()), 10)
    assert "stage 2" in engine.fault()
    with pytest.raises(EngineLost):
        run.prefill(tokens(300), run.pages(300))
    engine.close()
    assert not first.is_running()
    assert not children()


@pytest.mark.parametrize("model", ["tiny", "deeper"])
def test_a_stage_killed_in_the_middle_of_a_step_ends_the_step(
    model: str, request: pytest.FixtureRequest
) -> None:
    engine = load(request.getfixturevalue(model), 2, 32 * MB)
    run = Sequences(engine)

    def on_layer(layer: int) -> None:
        for child in children():
            child.kill()

    def prefill_twice() -> None:  # the stage may already have finished its part of the first one
        for _ in range(2):
            run.prefill(tokens(1000), run.pages(1000), on_layer=on_layer)

    with pytest.raises(EngineLost):
        prefill_twice()
    engine.close()
    assert not children()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_node_is_not_the_stages(tiny: Path, signum: int) -> None:
    engine = load(tiny, 2)
    os.kill(children()[0].pid, signum)
    run = Sequences(engine)
    assert run.prefill(tokens(50), run.pages(50)).tokens
    engine.close()
    assert not children()


@pytest.mark.parametrize(
    ("model", "backend", "stages", "reason"),
    [
        ("toy", "auto", 2, "toy"),
        ("tiny", "torch", 2, "lean path"),
        ("tiny", "cpu-general", 2, "lean path"),
        ("tiny", "cpu", 4, "3 layers"),
        ("gpt2", "cpu", 2, "gpt2 model"),
    ],
)
def test_what_has_no_stages_is_refused(
    tiny: Path, tmp_path: Path, model: str, backend: str, stages: int, reason: str
) -> None:
    folder = {"toy": "toy", "tiny": tiny}.get(model) or save_tiny(tmp_path, "GPT2", n_positions=512, n_head=4)
    with pytest.raises(Invalid, match=reason) as refused:
        load(folder, stages, backend=backend)
    assert refused.value.param == "stages"
    assert not children()
