"""Simulated time: callbacks run in order of their time. Those of equal times run in the order they were scheduled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Callback = Callable[[Any], None]


class Timeline:
    """Runs callbacks until none is left. Deterministic: equal times run in the order they were scheduled."""

    def __init__(self, message_s: float) -> None:
        self.now = 0.0
        self._message_s = message_s
        self._heap: list[tuple[float, int, Callback, Any]] = []
        self._messages: deque[tuple[float, int, Callback, Any]] = deque()
        """Messages under way. All take equally long and arrive in the order they were sent, so no heap is needed."""
        self._number = count()

    def at(self, time: float, callback: Callback, argument: Any = None) -> None:
        """Call at that time, or now if that time has passed."""
        heappush(self._heap, (time if time > self.now else self.now, next(self._number), callback, argument))

    def send(self, callback: Callback, argument: Any = None) -> None:
        """Call when a control message that is sent now arrives."""
        self._messages.append((self.now + self._message_s, next(self._number), callback, argument))

    def run(self) -> None:
        heap, messages = self._heap, self._messages
        next_message = messages.popleft
        while heap or messages:
            if messages and (not heap or messages[0] < heap[0]):
                self.now, _, callback, argument = next_message()
            else:
                self.now, _, callback, argument = heappop(heap)
            callback(argument)
