"""Traces for simulator tests: a real one if it is available, and small synthetic ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

CONVERSATION = Path(__file__).parents[3] / ".." / "shared" / "data" / "traces" / "conversation_trace.jsonl"

needs_conversation_trace = pytest.mark.skipif(
    not CONVERSATION.exists(),
    reason=f"needs the conversation trace at {CONVERSATION.name} in ../shared/data/traces",
)


def dialogues(
    count: int, *, rate: float = 1.8, turns: int = 3, seed: int = 1, blocks: int = 12, output: int = 150
) -> Iterator[bytes]:
    """Lines of a trace of dialogues. The prompt of each turn begins with the prompt of the turn before."""
    draw = random.Random(seed)
    now_ms, ids = 0.0, iter(range(1, 10**9))
    open_ones: list[list[int]] = []
    for _ in range(count):
        now_ms += draw.expovariate(rate) * 1000
        if open_ones and draw.random() < 1 - 1 / turns:
            history = open_ones.pop(draw.randrange(len(open_ones)))
        else:
            history = [0]
        history = history + [next(ids) for _ in range(draw.randint(1, 2 * blocks))]
        open_ones.append(history)
        del open_ones[:-40]
        tail = draw.randint(1, 511)
        row = {
            "timestamp": int(now_ms),
            "input_length": 512 * len(history) + tail,
            "output_length": draw.randint(1, 2 * output),
            "hash_ids": [*history, next(ids)],
        }
        yield json.dumps(row).encode()
