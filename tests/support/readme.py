"""The README as a script: what it tells people to type is what the tests run."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def curl_line(url: str) -> str:
    """The README's curl command, continued lines included, asking the gateway at `url`."""
    lines = README.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("curl "))
    end = next(i for i in range(start, len(lines)) if not lines[i].endswith("\\"))
    command = "\n".join(lines[start : end + 1])
    assert "http://127.0.0.1:8000" in command
    return command.replace("http://127.0.0.1:8000", url)
