"""The program that compares builds of the kernels with plain loops."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from shared.engine.native.build import CannotBuild

_SOURCE = Path(__file__).parent / "check.cpp"


def build_check(folder: Path) -> Path:
    """Build the program into the folder. It needs only a C library, and runs on any x86-64 CPU. Raises CannotBuild if
    there is no compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler is installed")
    program = folder / "check"
    flags = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-static-libstdc++", "-static-libgcc")
    done = subprocess.run(
        [compiler, *flags, str(_SOURCE), "-o", str(program), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return program
