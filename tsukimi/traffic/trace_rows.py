"""A recorded trace, scaled to what a small model takes, as prompts that share exactly the prefixes of the recording.

A row of a trace names its prompt's blocks by id; each id stands for a block and everything before it. Scaled, a block
has a whole number of the cluster's KVCache blocks, so that two prompts share cluster blocks exactly where their rows
share ids. What follows the last full block is new in every row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import Struct

from shared.core.kv.block_keys import KEY_BYTES
from shared.protocol.ids import BlockKey
from tsukimi.simulate.trace import TRACE_BLOCK_TOKENS, TraceRequest


class ScaledRow(Struct, frozen=True):
    """One request to send."""

    number: int
    arrival_s: float
    """From the first row's arrival, as recorded."""
    blocks: tuple[BlockKey, ...]
    """Scaled blocks, by the trace's ids."""
    tail_tokens: int
    """Tokens after the last full block; nobody shares them."""
    output_tokens: int


class ScaledTrace(Struct, frozen=True):
    rows: tuple[ScaledRow, ...]
    block_tokens: int
    """Length of a scaled block."""
    kv_block_tokens: int
    """Length of the cluster's KVCache block."""
    cut: int
    """Rows shortened because they did not fit the model's context."""

    def prompt_tokens(self, row: ScaledRow) -> int:
        return len(row.blocks) * self.block_tokens + row.tail_tokens


def scale_rows(
    requests: Sequence[TraceRequest],
    scale: float,
    *,
    kv_block_tokens: int,
    context_tokens: int,
    most_output_tokens: int,
) -> ScaledTrace:
    """Lengths times `scale`, at least one token each. A prompt that does not fit the context loses blocks at its end. An
    answer has at most `most_output_tokens` tokens."""
    per_block = max(1, round(TRACE_BLOCK_TOKENS * scale / kv_block_tokens))
    block_tokens = per_block * kv_block_tokens
    first_s = requests[0].arrival_s if requests else 0.0
    rows, cut = [], 0
    for request in requests:
        output = min(most_output_tokens, max(1, round(request.output_tokens * scale)))
        tail = request.prompt_tokens - len(request.block_keys) * TRACE_BLOCK_TOKENS
        blocks, tail = request.block_keys, max(1, round(tail * scale))
        most = context_tokens - output
        if len(blocks) * block_tokens + tail > most:
            cut += 1
            tail = min(tail, most)
            blocks = blocks[: (most - tail) // block_tokens]
        rows.append(ScaledRow(request.number, request.arrival_s - first_s, blocks, tail, output))
    return ScaledTrace(tuple(rows), block_tokens, kv_block_tokens, cut)


class Prompts:
    """Token ids of the rows. The same salt gives the same ids; another salt shares no block with it."""

    def __init__(self, trace: ScaledTrace, *, ids: range, avoid: Sequence[int] = (), salt: str = "") -> None:
        """`ids`: where token ids are drawn from, without `avoid`."""
        self._trace = trace
        self._ids = [i for i in ids if i not in set(avoid)]
        self._salt = salt
        self._blocks: dict[BlockKey, list[int]] = {}

    def of(self, row: ScaledRow) -> list[int]:
        tokens: list[int] = []
        for key in row.blocks:
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = self._drawn(key.hex(), self._trace.block_tokens)
            tokens += block
        return tokens + self._drawn(f"row {row.number}", row.tail_tokens)

    def _drawn(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._salt}/{name}").choices(self._ids, k=count)


def as_simulated(trace: ScaledTrace, speed: float) -> list[TraceRequest]:
    """The same rows for the simulator, in KVCache blocks of the cluster. Arrival times are divided by `speed`."""
    per_block = trace.block_tokens // trace.kv_block_tokens
    found = []
    for row in trace.rows:
        prompt = trace.prompt_tokens(row)
        keys = [_part(key, i) for key in row.blocks for i in range(per_block)]
        for i in range(len(keys), prompt // trace.kv_block_tokens):
            keys.append(_part(b"\xff" + row.number.to_bytes(KEY_BYTES - 1, "big"), i))
        found.append(TraceRequest(row.number, row.arrival_s / speed, prompt, row.output_tokens, tuple(keys)))
    return found


def _part(key: BlockKey, part: int) -> BlockKey:
    """Key of one KVCache block of a trace block. Trace ids have 64 bits, the upper half of a key is free."""
    number = int.from_bytes(key, "big")
    return (number ^ (part + 1) << 72).to_bytes(KEY_BYTES, "big")
