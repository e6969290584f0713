"""python -m tsukimi.compiled.build: compile the scheduling code for this interpreter, once per source.

A build is whole or absent. A machine that cannot compile gets one line with the reason, and nothing else changes.
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
"""Groups of modules that are compiled in parallel. Calls within a group are cheaper than between groups."""

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
    """Why there is no build, and how to get one."""


def build() -> Path:
    """The folder with a build of the present sources. Raises CannotCompile."""
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
    """Compile a copy: nothing is left beside the sources, and changes to them meanwhile do not matter."""
    for package in ("shared", "tsukimi"):
        shutil.copytree(sources.ROOT / package, temp / package, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [path.as_posix() for path in sources.to_compile()]
    groups = [[path for path in paths if path.startswith(package)] for package in sources.PACKAGES]
    lib = temp / "lib"
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        json.dumps([groups, sources.OPTIMISE, str(lib), str(temp / "temp")]),
    ]
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
