"""What to compute on, in which number format, by which attention backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from msgspec import Struct

from shared.engine.attention.api import AttentionBackend, AttentionShape
from shared.engine.attention.cpu import CpuAttention
from shared.engine.attention.reference import ReferenceAttention
from shared.protocol.errors import Invalid

Build = Callable[[AttentionShape, Sequence[torch.Tensor]], AttentionBackend]

_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class Hardware(Struct, frozen=True):
    device: torch.device
    dtype: str
    backend: Build
    mirrored: bool = False
    """KV pages live on the device, and the shared memory mirrors them."""


def choose(backend: str, dtype: str) -> Hardware:
    """Resolve `auto`s. Raises Invalid for what this machine, or the backend, cannot do."""
    if backend == "auto":
        backend = "flashinfer" if torch.cuda.is_available() and find_spec("flashinfer") else "cpu"
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise Invalid(f"dtype {dtype!r} is none of auto, float32, bfloat16, float16", param="dtype")
    if backend == "flashinfer":
        return _flashinfer(dtype)
    builds: dict[str, Build] = {"cpu": CpuAttention, "reference": ReferenceAttention}
    if backend not in builds:
        raise Invalid(f"backend {backend!r} is none of auto, cpu, flashinfer, reference", param="backend")
    if dtype == "auto":
        dtype = "bfloat16" if cpu_computes_bfloat16() else "float32"
    return Hardware(torch.device("cpu"), dtype, builds[backend])


def cpu_computes_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 products; without, it is slower than float32."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {
        flag for line in info.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()
    }
    return bool(flags & _NATIVE_BFLOAT16)


def _flashinfer(dtype: str) -> Hardware:
    if not torch.cuda.is_available():
        raise Invalid("backend flashinfer needs a GPU that torch can use", param="backend")
    if not find_spec("flashinfer"):
        raise Invalid("backend flashinfer needs the package flashinfer-python (extra `gpu`)", param="backend")
    if dtype == "float32":
        raise Invalid("backend flashinfer computes in bfloat16 or float16 only", param="dtype")
    from shared.engine.attention.flashinfer import FlashInferAttention

    dtype = "bfloat16" if dtype == "auto" else dtype
    return Hardware(torch.device("cuda"), dtype, FlashInferAttention, mirrored=True)
