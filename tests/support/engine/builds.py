"""The builds of the C++ kernels that tests can run on this machine: the product's builds, and builds of the AVX-512 code
for CPUs that have only AVX2."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import pytest

from shared.engine.native.build import BUILDS, Build, CannotBuild, cpu_flags
from shared.engine.native.kernels import Kernels, load_build

_HEADER = Path(__file__).parent / "avx512_by_halves.h"


def _by_halves(name: str, *flags: str) -> Build:
    """A build of the AVX-512 code for AVX2; avx512_by_halves.h says how. It is little optimised, so that it compiles in
    seconds. But products and sums are still fused, as for AVX-512, so results are bit-identical to those of the AVX-512
    build, except for the tails of norms."""
    header = hashlib.blake2b(_HEADER.read_bytes(), digest_size=8).hexdigest()
    return Build(
        f"{name}_by_halves",
        frozenset({"avx2", "fma"}),
        (
            "-mavx2", "-mfma", "-O1", "-fexpensive-optimizations", "-Wno-psabi", "-include", str(_HEADER),
            f"-DHEADER_{header}", *flags,  # the flags are part of the digest: a change of the header causes a rebuild
        ),
    )  # fmt: skip


_BUILDS = {
    build.name: build
    for build in (*BUILDS, _by_halves("avx512"), _by_halves("avx512_bf16", "-DPAIRS_BY_HALVES"))
}
TESTED = tuple(_BUILDS)


def build_of(name: str) -> Build:
    """The build of this name. Skips the test if this CPU cannot run it."""
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
    """The loaded kernels of this build. Skips the test if this CPU cannot run them, or there is no compiler."""
    found = _loaded(build_of(name))
    if isinstance(found, str):
        pytest.skip(found)
    return found
