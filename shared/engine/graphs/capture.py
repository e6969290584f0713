"""What turns a step over fixed memory into one that is launched as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_WARM_UPS = 2
"""Runs before a capture: lazily made handles, workspaces and kernels must exist by then."""


class Capture(Protocol):
    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run `step` and return what does the same work on the same memory again. Raises if it cannot; the device
        computes on as before then."""
        ...


class CudaCapture:
    """Implements Capture by CUDA graphs. They share one pool of memory: only one may run at a time, and what a step
    leaves in memory of its own is lost with the next one. Capture the largest first: the others fit into its memory."""

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
        with self._cuda.stream(self._stream):  # a capture that fails leaves its stream the current one
            for _ in range(_WARM_UPS):
                step()
            # thread_local: what other threads do on the device meanwhile does not void the capture.
            with self._cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        current.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay
