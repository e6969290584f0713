"""A metric: a prefill service that counts the hand-offs it began. Nothing else has to know of it.

The counters travel in the node's heartbeats. The gateway has no row for them, so its /metrics shows them as
tsukimi_node_other_total{counter="..."}. A row in the gateway's node_metrics.py gives one a name of its own.

tsukimi up --model toy --use prefill=tests.examples.metric
curl -s http://127.0.0.1:8000/metrics | grep handoffs_opened
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from services.prefill.app import PrefillNode
from services.prefill.config import Config
from shared.core.worker.transfers import OpenHandoff
from shared.io.service import Context, run


class CountingNode(PrefillNode):
    """Implements io.service.App. Does what the stock node does, and counts. Counters only ever grow."""

    def __init__(self, context: Context, config: Config) -> None:
        super().__init__(context, config)
        self._handoffs = 0

    def execute(self, command: Any) -> Awaitable[Any] | None:
        if isinstance(command, OpenHandoff):
            self._handoffs += 1
        return super().execute(command)

    def own_counters(self) -> dict[str, float]:
        return {**super().own_counters(), "handoffs_opened": float(self._handoffs)}


if __name__ == "__main__":
    run(Config, "prefill", CountingNode)
