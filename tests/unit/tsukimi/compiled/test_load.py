"""In processes of their own: what a process imported stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tsukimi.compiled import build, sources
from tsukimi.compiled.load import BuildFinder


def says(program: str, cache: Path) -> str:
    environment = os.environ | {"TSUKIMI_CACHE": str(cache / "models")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_without_a_build_the_source_is_run(tmp_path: Path) -> None:
    program = """
from tsukimi.compiled.load import use_compiled
print(use_compiled())
import shared.core.kv.pool
print(shared.core.kv.pool.__file__.rpartition(".")[2])
"""
    assert says(program, tmp_path).split() == ["False", "py"]


def test_a_build_does_not_meet_modules_that_were_imported_as_source(tmp_path: Path) -> None:
    program = """
from tsukimi.compiled import sources
from tsukimi.compiled.load import use_compiled
built = sources.folder() / "shared/core/kv" / f"pool{sources.SUFFIX}"
built.parent.mkdir(parents=True)
built.touch()
import shared.core.kv.pool
print(use_compiled())
"""
    assert says(program, tmp_path) == "False"


def test_what_a_build_has_is_found_and_nothing_else(tmp_path: Path) -> None:
    inside = tmp_path / "shared/core/kv" / f"pool{sources.SUFFIX}"
    inside.parent.mkdir(parents=True)
    inside.touch()
    (tmp_path / f"0a__mypyc{sources.SUFFIX}").touch()
    finder = BuildFinder(tmp_path)
    assert finder.names == {"shared.core.kv.pool", "0a__mypyc"}
    spec = finder.find_spec("shared.core.kv.pool", None)
    assert spec is not None
    assert spec.origin == str(inside)
    assert finder.find_spec("shared.core.kv.block_tree", None) is None


def test_why_nothing_is_built_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "folder", lambda: tmp_path / "none")
    monkeypatch.setenv("CC", "no-such-compiler")
    build.main()
    assert "no C compiler (no-such-compiler): apt-get install gcc" in capsys.readouterr().err


def test_a_source_that_mypyc_refuses_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for package in (*sources.DEPENDS_ON, "tsukimi/simulate"):
        (root / package).mkdir(parents=True, exist_ok=True)
    (root / "shared/core/wrong.py").write_text("def f() -> int:\n    return 'x'\n")
    monkeypatch.setattr(sources, "ROOT", root)
    monkeypatch.setattr(sources, "folder", lambda: tmp_path / "cache" / "none")
    with pytest.raises(build.CannotCompile, match=r"wrong\.py:2"):
        build.build()
    assert list((tmp_path / "cache").iterdir()) == []
