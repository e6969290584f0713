"""Small tensors from the host to a device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pinned(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the host, and page-locked where a GPU will read it: only then does a copy to it not block. torch keeps the
    memory from being used again before the copies are over."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device; what is computed from now on finds it there."""
    if device.type != "cuda":
        return host.to(device)
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)
