"""The repository explains itself: it points at nothing that its readers do not have."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.imports import REPOSITORY

ELSEWHERE = re.compile(
    r"(?i:pitfall|\bissue \d|\bbars? \d)|\b[Pp]aper [A-Z]\b|\b(measured|house|design|style)\.md"
)
"""Numbered lists, letters of sections and notes that are not in the repository."""
TEXTS = {".py", ".md", ".toml", ".yml", ".sh", ".h", ".cpp", ".Dockerfile", ""}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this copy is not a git checkout: nothing says which files belong to it")
    names = [Path(name) for name in listed.stdout.splitlines()]
    return [name for name in names if name.suffix in TEXTS and (REPOSITORY / name).is_file()]


def test_nothing_outside_is_referred_to() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in tracked()
        if name != Path(__file__).relative_to(REPOSITORY)
        for number, line in enumerate((REPOSITORY / name).read_text(errors="replace").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    ["def test_pitfall_2_1_x", "(issue 2, bar 8)", "see bars 3", "fitted (paper D)", "as house.md says"],
)
def test_a_reference_would_be_found(line: str) -> None:
    assert ELSEWHERE.search(line)
