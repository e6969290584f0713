"""A ring of staging buffers. It bounds the copies in flight, which end in the order in which they began."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from msgspec import Struct

from shared.engine.staging.lanes import Mark

Start = Callable[[torch.Tensor], Mark]
Finish = Callable[[torch.Tensor], None]


class _Copy(Struct):
    slot: int
    mark: Mark
    finish: Finish | None


class Ring:
    """A buffer belongs to one copy from `stage` until that copy has ended. A copy has ended when its mark is over and its
    `finish` has returned. For one thread; callbacks are called only from within the methods."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._copies: deque[_Copy] = deque()
        self._next = 0

    def __len__(self) -> int:
        """Number of copies that have not ended."""
        return len(self._copies)

    def stage(self, start: Start, finish: Finish | None = None) -> Mark:
        """Begin a copy with the next buffer: `start` is called with it. If no buffer is free, first waits for the oldest
        copy to end; this is the only back-pressure. `finish` is called with the buffer when the copy ends."""
        if len(self._copies) == len(self._buffers):
            self._end_oldest()
        slot = self._next
        mark = start(self._buffers[slot])
        self._next = (slot + 1) % len(self._buffers)
        self._copies.append(_Copy(slot, mark, finish))
        return mark

    def end_finished(self) -> None:
        """End all copies that can be ended without waiting."""
        while self._copies and self._copies[0].mark.over():
            self._end_oldest()

    def settle(self) -> None:
        """End all copies, waiting for them."""
        while self._copies:
            self._end_oldest()

    def forget(self) -> None:
        """Drop the `finish` of all copies that have not ended. The copies still end in order, without calling it."""
        for copy in self._copies:
            copy.finish = None

    def check(self) -> None:
        slots = [copy.slot for copy in self._copies]
        count = len(self._buffers)
        assert slots == [(self._next - len(slots) + i) % count for i in range(len(slots))], (
            slots,
            self._next,
        )
        assert len(set(slots)) == len(slots) <= count, slots

    def _end_oldest(self) -> None:
        self._copies[0].mark.wait()
        copy = self._copies.popleft()
        if copy.finish is not None:
            copy.finish(self._buffers[copy.slot])
