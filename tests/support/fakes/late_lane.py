"""A staging lane that does its work as late as allowed, so code that reads or reuses a buffer too early fails."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LateMark:
    def __init__(self, lane: LateLane, work: Callable[[], object]) -> None:
        self._lane = lane
        self.work = work
        self.done = False

    def over(self) -> bool:
        return self.done

    def wait(self) -> None:
        while not self.done:
            self._lane.advance()


class LateLane:
    """Implements staging.lanes.Lane. Work is done in order of submission, and only when needed: when its mark is waited
    for, when `compute` is called (the test must do so before it looks at pages), or one at a time with `advance`."""

    def __init__(self) -> None:
        self.waiting: list[LateMark] = []
        self.buffers: list[torch.Tensor] = []
        self.most_waiting = 0
        self._before_computing: LateMark | None = None

    def buffer(self, size_bytes: int) -> torch.Tensor:
        made = torch.full((size_bytes,), 0x77, dtype=torch.uint8)
        self.buffers.append(made)
        return made

    def indices(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def submit(self, work: Callable[[], object]) -> LateMark:
        mark = LateMark(self, work)
        self.waiting.append(mark)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return mark

    def precede_computing(self, mark: LateMark) -> None:
        self._before_computing = mark

    def compute(self) -> None:
        """Computing begins: do the work that must precede it."""
        if self._before_computing is not None:
            self._before_computing.wait()

    def advance(self) -> None:
        mark = self.waiting.pop(0)
        mark.work()
        mark.done = True
