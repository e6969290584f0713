"""A stand-in for torch.cuda that logs its calls: which stream is current when, and which waits for which.

Every call that the product makes is bound to the signature of the real thing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._cuda.log.append(f"{self.name} waits for event {event.at}")


class Event:
    at = ""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: Stream) -> None:
        self.at = f"{len(self._cuda.log)} on {stream.name}"
        self._cuda.log.append(f"event {self.at}")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._cuda.log.append(f"wait for event {self.at}")


class Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.log.append("replay")


class FakeCuda:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.main = Stream(self, "main")
        self.current = self.main
        self.graph_arguments: list[dict[str, Any]] = []
        self._made = 0
        for name, fake in (
            ("Stream", self._stream),
            ("Event", lambda **named: Event(self)),
            ("CUDAGraph", lambda: Graph(self)),
            ("current_stream", lambda device=None: self.current),
            ("graph_pool_handle", lambda: "the pool"),
            ("synchronize", lambda device=None: self.log.append("synchronize")),
            ("stream", self._on),
            ("graph", self._graph),
        ):
            patch.setattr(torch.cuda, name, bound(getattr(torch.cuda, name), fake))

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self.current.name}")

    def _stream(self, device: Any = None) -> Stream:
        self._made += 1
        return Stream(self, f"side {self._made}")

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph: Graph, **named: Any) -> Iterator[None]:
        """Like the real one, leaves its stream current if the capture fails."""
        self.graph_arguments.append(named)
        before, self.current = self.current, named["stream"]
        self.log.append("capture begins")
        try:
            yield
        except BaseException as e:
            raise RuntimeError("operation failed due to a previous error during capture") from e
        self.log.append("capture ends")
        self.current = before


def bound(real: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    def call(*args: Any, **named: Any) -> Any:
        signature.bind(*args, **named)
        return fake(*args, **named)

    return call
