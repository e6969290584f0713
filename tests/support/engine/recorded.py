"""Captures on a CPU: records the operations of a step and the memory they ran on, and repeats them on the same memory.

Like a CUDA graph, a replay does not run the step's Python code: values that the step read on the host stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique", "equal")
"""Operations for whose results the host waits. A capture that contains one fails."""


class HostRead(RuntimeError):
    pass


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.__name__.startswith("index") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if masks or func.__name__.partition(".")[0] in HOST_READS:
            raise HostRead(f"{func} reads from the device within a capture")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, before in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Implements graphs.capture.Capture."""

    def __init__(self, device: torch.device) -> None:
        self.recordings: list[Recording] = []

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        recording = Recording()
        with recording:
            step()
        self.recordings.append(recording)
        return recording.replay


def as_it_comes(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Creates a Capture that records nothing: to repeat a step, it calls the step itself."""
    return lambda step: step
