"""Out-of-memory errors and failures of a compute device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.protocol.errors import Invalid


@contextmanager
def needs_memory(what: str, param: str) -> Iterator[None]:
    """Turn the device's out-of-memory errors into Invalid. `param` names the setting that asks for the memory."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise Invalid(f"the device has no memory for {what}: {e}", param=param) from e


def fault_after_error(device: torch.device) -> str:
    """Why the device can never compute again; empty if it can. Call this after a step has raised.

    Waits until all work of that step is done, so that the next step does not overwrite memory that is still being read
    (e.g. a plan's page-locked tables)."""
    try:
        wait_for(device)
    except RuntimeError as e:  # once the device has failed, every later call raises
        return f"the device failed: {e}"
    return ""


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
