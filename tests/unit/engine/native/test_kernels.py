"""Products, attention and whole layers of each build against plain loops of doubles: tests/emulated/check.cpp, which the
true AVX-512 libraries pass in an emulator."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.native.build import CannotBuild, library  # noqa: E402
from tests.emulated.program import build_check  # noqa: E402
from tests.support.engine.builds import TESTED, build_of  # noqa: E402


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_check(tmp_path_factory.mktemp("check"))
    except CannotBuild as e:
        pytest.skip(str(e))


@pytest.fixture(params=TESTED)
def kernels(request: pytest.FixtureRequest) -> Path:
    try:
        return library(build_of(request.param))
    except CannotBuild as e:
        pytest.skip(str(e))


def said(check: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run([check, *words], capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout


def test_computes_what_plain_loops_compute(check: Path, kernels: Path) -> None:
    code, text = said(check, str(kernels))
    assert code == 0, text
    assert text.endswith("ALL PASSED\n")
    assert text.count("passed ") == 10


def test_a_result_that_is_off_by_a_hundredth_fails(check: Path) -> None:
    try:
        kernels = library(build_of("portable"))
    except CannotBuild as e:
        pytest.skip(str(e))
    code, text = said(check, "--spoil", str(kernels))
    assert code == 1
    assert text.count("FAILED ") == 10
    assert "passed " not in text
