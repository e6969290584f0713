"""Compiles the C++ sources to a shared library in the cache folder, once per source, compiler and instruction set.

`python -m shared.engine.native.build FOLDER` builds all of BUILDS ahead of time, for machines without a compiler. These
load the libraries from the folder that TSUKIMI_KERNELS_FOLDER names.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from msgspec import Struct

from shared.io.config import environment
from shared.io.models import models_folder

SOURCES = Path(__file__).parent
COMMON = (
    "-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-fPIC", "-shared",
    "-static-libstdc++", "-static-libgcc",
)  # fmt: skip
_COMPILERS = ("c++", "g++", "clang++")


class Build(Struct, frozen=True):
    """One way to build the kernels."""

    name: str
    needs: frozenset[str]
    """CPU flags that it needs, as in /proc/cpuinfo."""
    flags: tuple[str, ...]


BUILDS = (
    Build(
        "avx512_bf16",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    ),
    Build(
        "avx512",
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    ),
    Build("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
    Build("portable", frozenset(), ()),
)
"""The fastest first."""


class CannotBuild(Exception):
    """There are no kernels; the message says why. torch computes instead."""


@cache
def cpu_flags() -> frozenset[str]:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line for line in info.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(flag for line in lines for flag in line.partition(":")[2].split())


def runnable() -> list[Build]:
    """The builds that this CPU can run, the fastest first."""
    return [build for build in BUILDS if build.needs <= cpu_flags()]


def library(build: Build) -> Path:
    """The built library. If it does not exist yet, compiles it, which takes seconds. Raises CannotBuild with the
    reason."""
    if (ahead := environment("TSUKIMI_KERNELS_FOLDER")) and (path := _ahead(Path(ahead), build)).exists():
        return path
    compiler = _compiler()
    path = _folder() / f"{build.name}-{_digest(build, _version(compiler))}.so"
    if not path.exists():
        _compile(compiler, build, path)
    return path


def build_ahead(folder: Path) -> list[Path]:
    """Build all of BUILDS into the folder, for machines that have this source but no compiler. Raises CannotBuild."""
    compiler = _compiler()
    paths = [_ahead(folder, build) for build in BUILDS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(_compile, compiler, *what) for what in zip(BUILDS, paths, strict=True)]:
            done.result()
    return paths


def _ahead(folder: Path, build: Build) -> Path:
    return folder / f"{build.name}-{_digest(build)}.so"


def _compiler() -> str:
    wanted = environment("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise CannotBuild(f"no C++ compiler ({wanted or ', '.join(_COMPILERS)}) is installed")


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _digest(build: Build, version: str = "") -> str:
    """A digest of everything that a library depends on: compiler version, flags and sources."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (version, *COMMON, *build.flags):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _compile(compiler: str, build: Build, path: Path) -> None:
    """The library is created whole or not at all, even when several processes build at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            command = [compiler, *COMMON, *build.flags, str(SOURCES / "kernels.cpp"), "-o", str(fresh)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CannotBuild(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-500:]}")
            os.replace(fresh, path)
    except OSError as e:
        raise CannotBuild(f"the kernels cannot be built in {path.parent}: {e}") from e


def _folder() -> Path:
    return models_folder().parent / "kernels"


if __name__ == "__main__":
    print(*build_ahead(Path(sys.argv[1])), sep="\n")
