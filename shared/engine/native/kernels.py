"""Python bindings of the C++ kernels. Tensors are passed as addresses. Calls release the GIL."""

from __future__ import annotations

import ctypes as c
from functools import cache
from typing import Any

import structlog
import torch
from msgspec import Struct

from shared.engine.native.build import BUILDS, Build, CannotBuild, library, runnable
from shared.engine.native.store import Store
from shared.io.config import environment

log = structlog.get_logger(__name__)

FLOATS, BF16, PAIRS = 0, 1, 2
"""Kinds of packed weights: floats; bf16 that is widened to floats; pairs of bf16 for the CPU's bf16 products."""


class Reach(c.Structure):
    _fields_ = (("window", c.c_int32), ("cap", c.c_float))


class Layer(c.Structure):
    """The struct Layer of layer.h."""

    _fields_ = (
        ("kind", c.c_int32), ("hidden", c.c_int32), ("inner", c.c_int32), ("epsilon", c.c_float),
        ("qkv", c.c_void_p), ("out", c.c_void_p), ("gate_up", c.c_void_p), ("down", c.c_void_p),
        ("attention_norm", c.c_void_p), ("mlp_norm", c.c_void_p), ("qkv_bias", c.c_void_p),
        ("query_norm", c.c_void_p), ("key_norm", c.c_void_p), ("reach", Reach), ("pages", c.c_void_p),
    )  # fmt: skip


class Space(c.Structure):
    """The struct Space of layer.h."""

    _fields_ = tuple(
        (name, c.c_void_p)
        for name in ("inputs", "attended", "activated", "qkv", "queries", "outputs", "gate_up")
    )


class Places(c.Structure):
    """The struct Places of layer.h."""

    _fields_ = (("cosines", c.c_void_p), ("sines", c.c_void_p), ("slots", c.c_void_p))


AfterLayer = c.CFUNCTYPE(None, c.c_int32)
"""A callback from the kernels into Python. Each call takes the GIL."""


class Kernels(Struct, frozen=True):
    """One loaded build."""

    build: str
    lib: Any
    panel: int
    """Outputs per panel of packed weights."""
    has_pairs: bool

    def kind(self, dtype: torch.dtype) -> int:
        """The kind in which weights of this type are packed."""
        if dtype == torch.float32:
            return FLOATS
        return PAIRS if self.has_pairs else BF16

    def product(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        outputs: int,
        norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> torch.Tensor:
        """x W^T [rows, outputs], for float32 rows x and packed weights W. With `norm`, x is first normalised by its
        root mean square and multiplied by `norm`."""
        y = torch.empty(len(x), outputs)
        inputs = torch.empty_like(x)
        self.lib.tsukimi_head(
            torch.get_num_threads(),
            self.kind(packed.dtype),
            x.data_ptr(),
            0 if norm is None else norm.data_ptr(),
            epsilon,
            len(x),
            x.shape[1],
            packed.data_ptr(),
            outputs,
            inputs.data_ptr(),
            y.data_ptr(),
        )
        return y

    def pack(self, weights: torch.Tensor, store: Store) -> torch.Tensor:
        """Pack weights [outputs, inputs], float32 or bfloat16, into panels for `product` and layers. The result is in the
        store."""
        outputs, inputs = weights.shape
        weights = weights.contiguous()
        panels = -(-outputs // self.panel)
        packed = store.take((panels * self.panel * inputs,), weights.dtype)
        self.lib.tsukimi_pack(
            torch.get_num_threads(),
            self.kind(weights.dtype),
            weights.data_ptr(),
            outputs,
            inputs,
            packed.data_ptr(),
        )
        return packed


@cache
def kernels() -> Kernels | None:
    """The fastest build that this machine can run, or the one that TSUKIMI_KERNELS names.

    None if TSUKIMI_KERNELS is `none`, if no build is sound, or, with a warning that says why, if the kernels cannot be
    built or run. Then torch computes instead, slower."""
    wanted = environment("TSUKIMI_KERNELS")
    if wanted == "none":
        return None
    builds = [build for build in runnable() if wanted in ("", None, build.name)]
    if not builds:
        log.warning("no_kernels", reason=f"this CPU does not run the build {wanted!r}")
        return None
    for build in builds:
        try:
            loaded = load(build.name)
        except CannotBuild as e:
            log.warning("no_kernels", reason=str(e), consequence="torch computes, several times slower")
            return None
        if sound(loaded):
            return loaded
        log.error("unsound_kernels", build=build.name, consequence="the next slower build is tried")
    return None


def sound(kernels: Kernels) -> bool:
    """Whether the build's products agree with torch's on this machine. Guards against faults of compilers and CPUs."""
    random, store = torch.Generator().manual_seed(1), Store()
    x, weights = torch.randn(13, 70, generator=random), torch.randn(100, 70, generator=random)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        y = kernels.product(x, kernels.pack(weights.to(dtype), store), len(weights))
        if not torch.allclose(y, x @ weights.to(dtype).float().T, atol=tolerance):
            return False
    return True


@cache
def load(name: str) -> Kernels:
    """Raises CannotBuild."""
    return load_build(next(build for build in BUILDS if build.name == name))


def load_build(build: Build) -> Kernels:
    """Raises CannotBuild."""
    try:
        lib = c.CDLL(str(library(build)))
    except OSError as e:
        raise CannotBuild(f"the kernels do not load: {e}") from e
    i, p, f = c.c_int32, c.c_void_p, c.c_float
    lib.tsukimi_plan_new.restype = c.c_void_p
    for name_, arguments in (
        ("panel", ()),
        ("has_pairs", ()),
        ("plan_new", (i, i, i, i, f)),
        ("plan_free", (p,)),
        ("plan_set", (p, i, p, i, p, i)),
        ("attend", (p, i, i, p, i, f, p, p)),
        ("pack", (i, i, p, i, i, p)),
        ("head", (i, i, p, p, f, i, i, p, i, p, p)),
        ("layers", (p, i, p, i, p, i, p, p, i, p)),
        ("write_kv", (p, i, p, p, i, p, p, i)),
    ):
        getattr(lib, f"tsukimi_{name_}").argtypes = arguments
    return Kernels(build.name, lib, lib.tsukimi_panel(), bool(lib.tsukimi_has_pairs()))
