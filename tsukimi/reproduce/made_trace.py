"""A trace of our own making, for results that must not hang on one recording: agents with long, shared system prompts.

Sessions arrive as a Poisson process. Each belongs to one of some agents, the popular ones far more often, and begins with
that agent's system prompt. Every turn adds what the last one answered, tool output and a new question. Answers are short
with a long tail.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from heapq import heappop, heappush

from tsukimi.simulate.trace import TRACE_BLOCK_TOKENS, TraceRow

AGENTS = 60
SESSIONS_PER_S = 1.9
TURNS = 3.2
PAUSE_S = 45.0


def agent_rows(requests: int, seed: int = 7) -> list[TraceRow]:
    """So many requests in order of time. The same seed gives the same rows."""
    draw = random.Random(seed)
    ids = iter(range(1 << 40))
    heads = [[next(ids) for _ in range(draw.randint(2, 14))] for _ in range(AGENTS)]
    weights = [1.0 / (rank + 1) for rank in range(AGENTS)]
    due: list[tuple[float, int, Iterator[TraceRow]]] = []
    rows: list[TraceRow] = []
    start_s = 0.0
    session = 0
    while len(rows) < requests:
        if not due or start_s <= due[0][0]:
            head = draw.choices(heads, weights)[0]
            heappush(due, (start_s, session, _session(draw, head, ids)))
            session += 1
            start_s += draw.expovariate(SESSIONS_PER_S)
            continue
        at_s, number, turns = heappop(due)
        row = next(turns, None)
        if row is None:
            continue
        rows.append(TraceRow(round(at_s * 1000), row.input_length, row.output_length, row.hash_ids))
        heappush(due, (at_s + draw.expovariate(1.0 / PAUSE_S), number, turns))
    return rows


def _session(draw: random.Random, head: list[int], ids: Iterator[int]) -> Iterator[TraceRow]:
    blocks = list(head)
    while True:
        blocks += [next(ids) for _ in range(min(120, int(draw.lognormvariate(1.6, 1.1))))]
        tail = draw.randint(1, TRACE_BLOCK_TOKENS - 1)
        output = max(1, min(2000, int(draw.lognormvariate(4.7, 1.0))))
        prompt = len(blocks) * TRACE_BLOCK_TOKENS + tail
        yield TraceRow(0, prompt, output, (*blocks, next(ids)))
        if draw.random() < 1.0 / TURNS:
            return
