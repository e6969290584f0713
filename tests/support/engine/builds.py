"""Every build of the C++ kernels that tests can run here: the product's, and the code of those for AVX-512 on CPUs that
have AVX2 alone."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import pytest

from shared.engine.native.build import BUILDS, Build, CannotBuild, cpu_flags
from shared.engine.native.kernels import Kernels, load_build

_HEADER = Path(__file__).parent / "avx512_by_halves.h"


def _by_halves(name: str, *flags: str) -> Build:
    """avx512_by_halves.h says how. Hardly optimised, so that it compiles in seconds; sums and products are fused all the
    same, as for AVX-512: the results are the same to the bit but for tails of norms."""
    header = hashlib.blake2b(_HEADER.read_bytes(), digest_size=8).hexdigest()
    return Build(
        f"{name}_by_halves",
        frozenset({"avx2", "fma"}),
        (
            "-mavx2", "-mfma", "-O1", "-fexpensive-optimizations", "-Wno-psabi", "-include", str(_HEADER),
            f"-DHEADER_{header}", *flags,  # a library is compiled again when what it depends on changes
        ),
    )  # fmt: skip


_BUILDS = {
    build.name: build
    for build in (*BUILDS, _by_halves("avx512"), _by_halves("avx512_bf16", "-DPAIRS_BY_HALVES"))
}
TESTED = tuple(_BUILDS)


def build_of(name: str) -> Build:
    """Skips where this CPU does not run it."""
    build = _BUILDS[name]
    if not build.needs <= cpu_flags():
        pytest.skip(f"this CPU does not run the {name} build")
    return build


@cache
def _loaded(build: Build) -> Kernels | str:
    try:
        return load_build(build)
    except CannotBuild as e:
        return str(e)


def loaded(name: str) -> Kernels:
    """Skips where this CPU does not run the build, or there is no compiler."""
    found = _loaded(build_of(name))
    if isinstance(found, str):
        pytest.skip(found)
    return found
