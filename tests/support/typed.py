"""A terminal for commands from the documents: bash in a folder of its own, with this checkout's programs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.imports import REPOSITORY
from tests.support.processes.launched import free_port

URL = "http://127.0.0.1:8000"
"""The gateway in the documents."""
SMALL = "--kv-memory 64M --pool-memory 64M"


class Terminal:
    """Commands run as they stand but for the port, and find their cluster's run dir in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.port = free_port()
        programs = folder / "bin"
        programs.mkdir()
        for name, words in (
            ("tsukimi", "-P -m tsukimi"),
            ("python", ""),
        ):  # -P: as the installed script, not the folder
            program = programs / name
            program.write_text(
                f'#!/bin/bash\nexport PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{REPOSITORY}"\n'
                f'exec {shlex.quote(sys.executable)} {words} "$@"\n'
            )
            program.chmod(0o755)
        self._environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "TSUKIMI_RUN_DIR": str(self.run_dir),
        }

    def type(self, text: str, *, answer: str = "", timeout_s: float = 120.0) -> str:
        """What the command prints; `answer` is typed into it. Raises AssertionError if it fails."""
        done = self.run(text, answer=answer, timeout_s=timeout_s)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run(
        self, text: str, *, answer: str = "", timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", text.replace(URL, f"http://127.0.0.1:{self.port}")],
            cwd=self.folder, env=self._environment, input=answer,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def up(self, text: str, more: str = "") -> str:
        """A documented `tsukimi up` in the background, with the toy engine and little memory."""
        model = "" if "--model" in text else "--model toy"
        return self.type(f"{text} {model} {SMALL} --detach --port {self.port} {more}", timeout_s=240)

    def down(self) -> None:
        self.run("tsukimi down --kill")
