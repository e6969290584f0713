"""The choice of device, number format and attention backend."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from msgspec import Struct

from shared.engine.attention.api import AttentionBackend, AttentionShape
from shared.engine.attention.cpu import CpuAttention
from shared.engine.attention.native import NativeAttention, computes
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.graphs.capture import Capture, CudaCapture
from shared.engine.native.build import cpu_flags
from shared.engine.native.kernels import Kernels, kernels
from shared.io.config import environment
from shared.protocol.errors import Invalid

Build = Callable[[AttentionShape, Sequence[torch.Tensor]], AttentionBackend]

BACKENDS = ("auto", "cpu", "cpu-general", "torch", "flashinfer", "reference")
"""cpu-general: transformers' own modules for every model. torch: the same, without the C++ kernels."""
_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class Hardware(Struct, frozen=True):
    device: torch.device
    dtype: str
    backend: Build
    mirrored: bool = False
    """KV pages live on the device, and the shared memory mirrors them."""
    capture: Callable[[torch.device], Capture] | None = None
    """Creates what captures decode steps; the backend must then be a FixableBackend. None: no captures."""
    first_prompts: tuple[int, ...] = ()
    """Lengths in tokens of prompts to compute before the engine is ready, so that kernels that are compiled at their
    first use are compiled by then."""
    kernels: Kernels | None = None
    """The C++ kernels for the lean path. None: all models take the general path."""


def choose(backend: str, dtype: str) -> Hardware:
    """Resolve `auto` in both arguments. Raises Invalid for what this machine or the backend cannot do."""
    if backend == "auto":
        backend = "flashinfer" if torch.cuda.is_available() and find_spec("flashinfer") else "cpu"
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise Invalid(f"dtype {dtype!r} is not one of auto, float32, bfloat16, float16", param="dtype")
    if backend == "flashinfer":
        return _flashinfer(dtype)
    if dtype == "auto":
        dtype = "bfloat16" if cpu_computes_bfloat16() else "float32"
    cpu = torch.device("cpu")
    match backend:
        case "cpu":
            built = kernels()
            return Hardware(cpu, dtype, _native(built) if built else CpuAttention, kernels=built)
        case "cpu-general":
            built = kernels()
            return Hardware(cpu, dtype, _native(built) if built else CpuAttention)
        case "torch":
            return Hardware(cpu, dtype, CpuAttention)
        case "reference":
            return Hardware(cpu, dtype, ReferenceAttention)
    raise Invalid(f"backend {backend!r} is not one of {', '.join(BACKENDS)}", param="backend")


def _native(built: Kernels) -> Build:
    """Builds the kernels' attention if they support the model's, else torch's."""

    def build(shape: AttentionShape, layers: Sequence[torch.Tensor]) -> AttentionBackend:
        if computes(shape, layers[0].dtype):
            return NativeAttention(shape, layers, built)
        return CpuAttention(shape, layers)

    return build


def cpu_computes_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 products. Without them bfloat16 is slower than float32."""
    return bool(cpu_flags() & _NATIVE_BFLOAT16)


def _flashinfer(dtype: str) -> Hardware:
    if not torch.cuda.is_available():
        raise Invalid("backend flashinfer needs a GPU that torch can use", param="backend")
    if not find_spec("flashinfer"):
        raise Invalid("backend flashinfer needs the package flashinfer-python (extra `gpu`)", param="backend")
    if not (find_spec("flashinfer_jit_cache") or _finds_nvcc()):
        raise Invalid(
            "backend flashinfer compiles its kernels at their first use, and there is no nvcc: install CUDA's toolkit "
            "(and set CUDA_HOME), or the package flashinfer-jit-cache",
            param="backend",
        )
    if dtype == "float32":
        raise Invalid("backend flashinfer computes in bfloat16 or float16 only", param="dtype")
    from shared.engine.attention.flashinfer import FlashInferAttention

    dtype = "bfloat16" if dtype == "auto" else dtype
    return Hardware(
        torch.device("cuda"),
        dtype,
        FlashInferAttention,
        mirrored=True,
        capture=CudaCapture,
        first_prompts=(2, 128),  # prompts of up to 64 tokens and longer ones use different kernels
    )


def _finds_nvcc() -> bool:
    home = environment("CUDA_HOME") or environment("CUDA_PATH") or "/usr/local/cuda"
    return bool(shutil.which("nvcc")) or (Path(home) / "bin" / "nvcc").exists()
