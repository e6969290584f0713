"""Monotonic totals that many threads add to."""

from __future__ import annotations

import threading


class Counters:
    NAMES = (
        "bytes_sent",
        "bytes_received",
        "slices_sent",
        "slices_received",
        "slices_corrupt",
        "blocks_corrupt",
        "blocks_fetched",
        "stale_writes_refused",
        "connections_opened",
        "connections_accepted",
        "connections_refused",
        "connections_lost",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(self.NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        """Raises KeyError on a name that is not in NAMES."""
        with self._lock:
            self._totals[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)
