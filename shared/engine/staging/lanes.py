"""Where copies run: a stream of the device's own, or at once where device and host are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a lane's work."""

    def over(self) -> bool:
        """Whether all work before it has been done."""
        ...

    def wait(self) -> None:
        """Block until it has been."""
        ...


class Lane(Protocol):
    """Work beside a device's computing, done in the order of submission. For one thread, the one that computes."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies to and from the device may run over while this thread goes on."""
        ...

    def indices(self, values: torch.Tensor) -> torch.Tensor:
        """The values on the device, for submitted work alone."""
        ...

    def submit(self, work: Callable[[], object]) -> Mark:
        """Do it after all that computing has been given so far. What it allocates on the device is the lane's."""
        ...

    def precede_computing(self, mark: Mark) -> None:
        """Whatever computing is given from now on waits for the mark, without blocking this thread."""
        ...


class _Over:
    def over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostLane:
    """Work is done as it is submitted: device and host are one."""

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
    """A stream beside the current one. Its buffers are page-locked, so that copies neither block nor are staged twice."""

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
            event = self._cuda.Event(blocking=True)  # a wait sleeps: the node's event loop has the core
            event.record(self._stream)
        return _Event(event)

    def precede_computing(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        self._cuda.current_stream(self._device).wait_event(mark.event)


def lane_beside(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane()
