"""Copies small tensors from the host to a device without waiting for the device's current work."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pinned(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor on the host, page-locked if `device` is a GPU: only then can it be copied without blocking. torch does not
    reuse the memory before the copies are done."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device. Work that is launched on the current stream from now on sees the copy."""
    if device.type != "cuda":
        return host.to(device)
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)
