from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shared.io.plugins.classes import load_classes, register
from shared.protocol.errors import Invalid


class Mine:
    """A user's own class."""


def test_a_built_in_name_changes_nothing() -> None:
    registry: dict[str, object] = {"lru": 1}
    register(registry, "lru", param="eviction")
    assert registry == {"lru": 1}


def test_a_class_is_registered_under_its_whole_name() -> None:
    registry: dict[str, object] = {}
    register(registry, f"{__name__}:Mine", param="policy")
    assert registry == {f"{__name__}:Mine": Mine}


def test_an_entry_is_made_from_the_class() -> None:
    registry: dict[str, object] = {}
    register(registry, f"{__name__}:Mine", param="eviction", adapt=lambda found: found())
    assert isinstance(registry[f"{__name__}:Mine"], Mine)


@pytest.mark.parametrize("name", ["fastest", "no.such.module:Policy", f"{__name__}:Missing", ":", "json:"])
def test_what_cannot_be_had_is_refused_by_its_name_and_field(name: str) -> None:
    registry: dict[str, object] = {"lru": 1}
    with pytest.raises(Invalid, match=name) as refused:
        register(registry, name, param="eviction")
    assert refused.value.param == "eviction"
    assert registry == {"lru": 1}


def test_the_current_folder_can_be_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_of_a_user.py").write_text("class Own: ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    registry: dict[str, object] = {}
    register(registry, "policy_of_a_user:Own", param="policy")
    assert "policy_of_a_user:Own" in registry


def test_a_module_that_raises_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module_of_a_user.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match="ZeroDivisionError"):
        register({}, "broken_module_of_a_user:Own", param="policy")


def test_a_list_of_classes_is_loaded_in_order() -> None:
    assert load_classes(f" {__name__}:Mine,json:JSONDecoder", param="transports") == (Mine, json.JSONDecoder)
    assert load_classes("", param="transports") == ()
    with pytest.raises(Invalid, match="no_such"):
        load_classes("no_such:Transport", param="transports")
