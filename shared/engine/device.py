"""What a device that computes may lack, and how it may fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.protocol.errors import Invalid


@contextmanager
def needs_memory(what: str, param: str) -> Iterator[None]:
    """Within it, a device that has too little memory is Invalid, by the name of the setting that asks for it."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise Invalid(f"the device has no memory for {what}: {e}", param=param) from e


def fault_after_error(device: torch.device) -> str:
    """Why the device can never compute again; empty if it can. For a step that raised: on return all that it began is
    done, so that the next one overwrites nothing that is still read (a plan's page-locked tables, for one)."""
    try:
        wait_for(device)
    except RuntimeError as e:  # an error of the device is told by every later call
        return f"the device failed: {e}"
    return ""


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
