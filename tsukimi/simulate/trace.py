"""Request traces in the format of the Mooncake papers: one JSON object a line.

    {"timestamp": 27482, "input_length": 1355, "output_length": 52, "hash_ids": [46, 47, 2353]}

Timestamps are milliseconds and never decrease. hash_ids name the prompt's blocks of 512 tokens; the last block may be
partial. Each id stands for a block and everything before it. Ids have 64 bits and are kept exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.core.kv.block_keys import KEY_BYTES, blocks_for
from shared.protocol.errors import Invalid
from shared.protocol.ids import BlockKey

TRACE_BLOCK_TOKENS = 512


class TraceRow(Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceRequest(Struct, frozen=True):
    """One request to replay."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_keys: tuple[BlockKey, ...]
    """Of the full blocks only: a partial one is never shared."""


def read_trace(path: Path, *, speed: float = 1.0, requests: int = 0) -> list[TraceRequest]:
    """All requests, or the first `requests`. Divides arrival times by `speed`. Raises Invalid naming file and line."""
    try:
        with path.open("rb") as file:
            return list(parse_trace(file, name=path.name, speed=speed, requests=requests))
    except OSError as e:
        raise Invalid(f"trace {path}: {e.strerror}", param="trace") from e


def parse_trace(
    lines: Iterable[bytes], *, name: str = "trace", speed: float = 1.0, requests: int = 0
) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(TraceRow)
    key_of = _Keys().__getitem__
    last, number = 0.0, 0
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {line_number}"
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as e:
            raise Invalid(f"{where}: {e}", param="trace") from e
        if problem := _problem(row, last):
            raise Invalid(f"{where}: {problem}", param="trace")
        last = row.timestamp
        full = row.input_length // TRACE_BLOCK_TOKENS
        yield TraceRequest(
            number=number,
            arrival_s=row.timestamp / 1000 / speed,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            block_keys=tuple(map(key_of, row.hash_ids[:full])),
        )
        number += 1
        if number == requests:
            return


def _problem(row: TraceRow, last_timestamp: float) -> str:
    blocks = blocks_for(row.input_length, TRACE_BLOCK_TOKENS)
    if row.timestamp < last_timestamp:
        return f"timestamp {row.timestamp:g} is before the previous one"
    if row.input_length < 1 or row.output_length < 1:
        return "input_length and output_length must be at least 1"
    if len(row.hash_ids) != blocks:
        return f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens; there must be {blocks}"
    if min(row.hash_ids) < 0 or max(row.hash_ids) >= 1 << 64:
        return "hash_ids must be unsigned 64-bit numbers"
    return ""


class _Keys(dict[int, BlockKey]):
    """Keys are shared: one object for each block, however many prompts have it."""

    def __missing__(self, hash_id: int) -> BlockKey:
        key = self[hash_id] = hash_id.to_bytes(KEY_BYTES, "big")
        return key
