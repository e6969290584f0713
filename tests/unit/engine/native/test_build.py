"""Kernels are built once, whole or not at all, and a machine that cannot build them is told why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.native import build as b  # noqa: E402
from shared.engine.native.kernels import kernels, load  # noqa: E402

PORTABLE = b.BUILDS[-1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSUKIMI_CACHE", str(tmp_path / "models"))
    monkeypatch.setattr(b, "COMMON", [flag.replace("-O3", "-O0") for flag in b.COMMON])
    return tmp_path / "kernels"


@pytest.fixture
def _fresh() -> Iterator[None]:
    """No build is loaded, neither before nor after."""
    for remembered in (kernels, load):
        remembered.cache_clear()
    yield
    for remembered in (kernels, load):
        remembered.cache_clear()


def test_every_cpu_runs_some_build_and_the_fastest_comes_first() -> None:
    names = [build.name for build in b.runnable()]
    assert names[-1] == "portable"
    assert names == [build.name for build in b.BUILDS if build.name in names]


def test_a_second_time_nothing_is_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = b.library(PORTABLE)
    assert [*cache.iterdir()] == [path]
    monkeypatch.setattr(b, "_compile", lambda *_: pytest.fail("compiled again"))
    assert b.library(PORTABLE) == path


def test_what_was_built_ahead_needs_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(b, "BUILDS", (PORTABLE,))
    (ahead,) = b.build_ahead(tmp_path / "ahead")
    monkeypatch.setenv("TSUKIMI_KERNELS_FOLDER", str(tmp_path / "ahead"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert b.library(PORTABLE) == ahead
    assert not cache.exists()


def test_without_a_compiler_the_reason_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(b.CannotBuild, match="no-such-compiler"):
        b.library(PORTABLE)
    assert not cache.exists()


def test_a_failed_compilation_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: it is Monday' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(b.CannotBuild, match="Monday"):
        b.library(PORTABLE)
    assert [*cache.iterdir()] == []


@pytest.mark.usefixtures("_fresh", "cache")
def test_the_engine_goes_on_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert kernels() is None


@pytest.mark.usefixtures("_fresh")
def test_a_build_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, name in (("portable", "portable"), ("none", None), ("no-such-build", None)):
        monkeypatch.setenv("TSUKIMI_KERNELS", wanted)
        kernels.cache_clear()
        found = kernels()
        assert (found and found.build) == name
