"""The documents' commands that take the real model and no cluster, with sizes that make them short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.claims import REAL, claimed
from tests.support.typed import Terminal

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

BRIEF = {
    "engine": "--prompts 64 --batches 1 --context 64 --rounds 1",
    "stack": "--requests 2 --concurrency 2 --input-tokens 32 --output-tokens 4 --rounds 1",
    "handoff": "--tokens 64 --rounds 1",
}


@pytest.fixture
def terminal(tmp_path: Path, small_model: Path) -> Terminal:
    """MODEL is a folder in Hugging Face format."""
    (tmp_path / "MODEL").symlink_to(small_model)
    return Terminal(tmp_path)


@pytest.mark.parametrize("text", claimed(f"{REAL}::test_a_model_is_fetched"))
def test_a_model_is_fetched(terminal: Terminal, text: str) -> None:
    terminal.type(text)
    assert "ready in" in terminal.type(text.replace("MODEL", "smollm2-135m"))


@pytest.mark.parametrize("text", claimed(f"{REAL}::test_a_bench_of_its_own"))
def test_a_bench_of_its_own(terminal: Terminal, text: str) -> None:
    name = text.split()[-1]
    for more in ("", "--stages 2 --threads 1") if name == "engine" else ("",):
        out = terminal.folder / "figures.json"
        terminal.type(f"{text} {BRIEF[name]} {more} --json {out}", timeout_s=500)
        assert out.stat().st_size > 0
        out.unlink()
