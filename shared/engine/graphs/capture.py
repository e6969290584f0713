"""Captures a step over fixed memory, so that it can be launched again as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_WARM_UPS = 2
"""Runs before a capture, so that lazily created handles, workspaces and kernels exist by then."""


class Capture(Protocol):
    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run `step`, and return a function that repeats the same work on the same memory. Raises if `step` cannot be
        captured; the device is still usable then."""
        ...


class CudaCapture:
    """Implements Capture by CUDA graphs. All graphs share one memory pool, so only one may run at a time, and memory
    that a step allocated is overwritten by the next step. Capture the largest step first: the others then fit into its
    memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda
        self._stream = self._cuda.Stream(device)
        self._pool = self._cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._captured(step)
        except BaseException:
            self._cuda.synchronize(self._device)
            raise

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = self._cuda.CUDAGraph()
        with self._cuda.stream(self._stream):  # restores the current stream, which a failed capture would not
            for _ in range(_WARM_UPS):
                step()
            # thread_local: work that other threads do on the device does not invalidate the capture.
            with self._cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        current.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay
