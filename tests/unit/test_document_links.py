"""Every relative link and every file that the documents name leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documented import documents, links, spans
from tests.support.imports import REPOSITORY

PAGES = [*documents(), "CHANGELOG.md", "shared/engine/README.md", "tests/emulated/README.md"]
ROOTS = ("shared", "services", "tsukimi", "tests", "docs", "Dockerfiles")


def paths_in(text: str) -> list[str]:
    """Files and folders of the repository that a page's inline code names, without placeholders and patterns."""
    found = []
    for span in spans(text):
        rooted = re.fullmatch(rf"({'|'.join(ROOTS)})/[\w/.-]+", span)
        if rooted or re.fullmatch(r"[\w/]*/?\w+\.(py|md|h|cpp|yml|toml)", span):
            found.append(span)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = REPOSITORY / page
    assert not [target for target in links(file.read_text()) if not (file.parent / target).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_named_files_exist(page: str) -> None:
    """A name without its folder is that of some file; those of the reader's own are in docs/experiments.md."""
    own = {"mypolicies/bounded.py"}
    missing = []
    for path in paths_in((REPOSITORY / page).read_text()):
        if (REPOSITORY / path).exists() or path in own:
            continue
        if not any(
            str(f).endswith(f"/{path}") for root in ROOTS for f in (REPOSITORY / root).rglob(Path(path).name)
        ):
            missing.append(path)
    assert not missing


def test_a_missing_file_would_be_found() -> None:
    assert paths_in("see `shared/core/gone.py`, `gone.py`, `tests/gone` and `--set x=y`") == [
        "shared/core/gone.py", "gone.py", "tests/gone"
    ]  # fmt: skip
    assert links("[a](gone.md#part) [b](https://x.org) [c](#here)") == ["gone.md"]
