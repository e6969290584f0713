"""The digest of weights: of their content alone, remembered while the files stay as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared.engine.weights.digest import digest_path, weights_digest
from shared.protocol.errors import Invalid


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSUKIMI_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"one" * 1000)
    (folder / "b.safetensors").write_bytes(b"two" * 1000)
    return folder


def test_copies_have_the_same_digest(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert weights_digest(folder) == weights_digest(copy)
    assert len(weights_digest(folder)) == 32


def test_content_names_and_number_of_files_count(folder: Path) -> None:
    digests = {weights_digest(folder)}
    (folder / "b.safetensors").write_bytes(b"tow" * 1000)
    digests.add(weights_digest(folder))
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    digests.add(weights_digest(folder))
    (folder / "c.safetensors").unlink()
    digests.add(weights_digest(folder))
    assert len(digests) == 4


def test_is_remembered_and_survives_a_broken_memory(folder: Path) -> None:
    first = weights_digest(folder)
    assert digest_path(folder).is_file()
    assert weights_digest(folder) == first
    digest_path(folder).write_text("broken")
    assert weights_digest(folder) == first


def test_needs_no_writable_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_digest(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TSUKIMI_CACHE", str(tmp_path / "file"))
    assert weights_digest(folder) == first


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"no .*safetensors"):
        weights_digest(tmp_path)
