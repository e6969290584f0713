"""The pages under docs/reference say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.config import GatewayConfig
from tests.references import configuration
from tests.references.__main__ import FOLDER, PAGES, main, stale


def test_the_committed_pages_are_fresh() -> None:
    assert stale(FOLDER) == [], "run `make references`"


def test_a_changed_field_makes_its_page_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Changed(GatewayConfig, frozen=True, kw_only=True):
        port: int = 8001

    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    monkeypatch.setitem(configuration.SERVICES, "gateway", Changed)
    assert main(["--check"], tmp_path) == 1
    said = capsys.readouterr().err
    assert "configuration.md" in said
    assert "messages.md" not in said


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_missing_page_is_stale(name: str, tmp_path: Path) -> None:
    main([], tmp_path)
    (tmp_path / name).unlink()
    assert stale(tmp_path) == [name]
