"""python -m tsukimi.compiled.build: compile the scheduling code for this interpreter, once per source.

Whole or not at all. A machine that can't is told why in a line, and nothing else changes for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from shared.io.config import environment
from tsukimi.compiled import sources

GROUPS = 2
"""Compiled side by side; calls within one are cheaper than between two."""

PROGRAM = """
import json, sys
from mypyc.build import mypycify
from setuptools import setup
groups, optimise, lib, temp = json.loads(sys.argv[1])
named = [(group, None) for group in groups]
extensions = mypycify(sum(groups, []), opt_level=optimise, debug_level="0", separate=named)
build = ["build_ext", "--build-lib", lib, "--build-temp", temp, "--parallel", str(len(groups))]
setup(name="compiled", packages=[], ext_modules=extensions, script_args=["-q", *build])
"""


class CannotCompile(Exception):
    """Why there is no build, and what brings one."""


def build() -> Path:
    """The folder with the build of the sources as they are. Raises CannotCompile."""
    folder = sources.folder()
    if folder.is_dir():
        return folder
    _require()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temp:
            fresh = _compile(Path(temp))
            if not folder.is_dir():
                os.rename(fresh, folder)
    except OSError as e:
        raise CannotCompile(f"it can't be compiled in {folder.parent}: {e}") from e
    return folder


def _require() -> None:
    if importlib.util.find_spec("mypyc") is None:
        raise CannotCompile("mypyc is not installed: pip install 'mypy[mypyc]'")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise CannotCompile("Python's header files are not installed: apt-get install python3-dev")
    compiler = (environment("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise CannotCompile(f"there is no C compiler ({compiler}): apt-get install gcc")


def _compile(temp: Path) -> Path:
    """From a copy: nothing is left beside the sources, and what changes there meanwhile does not matter."""
    for package in ("shared", "tsukimi"):
        shutil.copytree(sources.ROOT / package, temp / package, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [path.as_posix() for path in sources.to_compile()]
    groups = [[path for path in paths if path.startswith(package)] for package in sources.PACKAGES]
    lib = temp / "lib"
    command = [sys.executable, "-c", PROGRAM, json.dumps([groups, sources.OPTIMISE, str(lib), str(temp / "temp")])]
    done = subprocess.run(command, cwd=temp, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotCompile(f"mypyc failed: {(done.stdout + done.stderr).strip()[-2000:]}")
    return lib


def main() -> None:
    try:
        build()
        print("The scheduling code is compiled for `tsukimi simulate`.")
    except CannotCompile as e:
        print(f"`tsukimi simulate` will run as Python, and take longer: {e}", file=sys.stderr)


if __name__ == "__main__":
    main()
