"""How copies are executed: on a separate CUDA stream, or at once where device and host are the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a lane's work."""

    def over(self) -> bool:
        """Whether all work before it is done."""
        ...

    def wait(self) -> None:
        """Block until all work before it is done."""
        ...


class Lane(Protocol):
    """Executes work alongside the device's computation, in the order of submission. Use it only from the thread that
    computes."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory, uint8 [size_bytes], with which copies to and from the device do not block this thread."""
        ...

    def indices(self, values: torch.Tensor) -> torch.Tensor:
        """The values on the device. Only submitted work may use them."""
        ...

    def submit(self, work: Callable[[], object]) -> Mark:
        """Execute `work` after all computation launched so far. The lane's stream owns the device memory that it
        allocates. Returns the point after it."""
        ...

    def precede_computing(self, mark: Mark) -> None:
        """Make all computation that is launched from now on wait for the mark, without blocking this thread."""
        ...


class _Over:
    def over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostLane:
    """Executes work at once when it is submitted: device and host are the same."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def indices(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def submit(self, work: Callable[[], object]) -> Mark:
        work()
        return _Over()

    def precede_computing(self, mark: Mark) -> None:
        pass


class _Event:
    def __init__(self, event: Any) -> None:
        self.event = event

    def over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaLane:
    """A second CUDA stream. Its buffers are page-locked, so that copies do not block and CUDA does not stage them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def indices(self, values: torch.Tensor) -> torch.Tensor:
        with self._cuda.stream(self._stream):
            return values.pin_memory().to(self._device, non_blocking=True)

    def submit(self, work: Callable[[], object]) -> Mark:
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            work()
            event = self._cuda.Event(blocking=True)  # a wait sleeps, so the node's event loop gets the core
            event.record(self._stream)
        return _Event(event)

    def precede_computing(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        self._cuda.current_stream(self._device).wait_event(mark.event)


def lane_beside(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane()
