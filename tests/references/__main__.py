"""python -m tests.references [--check]: write the pages under docs/reference, or tell which ones are stale."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.references import configuration, messages, metrics

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration.render,
    "messages.md": messages.render,
    "metrics.md": metrics.render,
}


def stale(folder: Path) -> list[str]:
    """Names of the pages that are missing or differ from what the code says."""
    return [name for name, render in PAGES.items() if _read(folder / name) != render()]


def main(argv: Sequence[str], folder: Path = FOLDER) -> int:
    """The exit code: 1 if `--check` found a stale page."""
    if "--check" in argv:
        names = stale(folder)
        for name in names:
            print(f"docs/reference/{name} is stale: run `make references`", file=sys.stderr)
        return 1 if names else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")
    return 0


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
