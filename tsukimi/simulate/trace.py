"""Request traces in the format of the Mooncake papers: one JSON object a line, plain or gzipped.

    {"timestamp": 27482, "input_length": 1355, "output_length": 52, "hash_ids": [46, 47, 2353]}

Timestamps are milliseconds and never decrease, unless TraceFormat says otherwise. hash_ids name the prompt's blocks of
512 tokens; the last block may be partial. Each id stands for a block and everything before it. Ids have 64 bits and are
kept exactly. Every row is read and checked before any is used.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from shared.core.kv.block_keys import KEY_BYTES, blocks_for
from shared.protocol.errors import Invalid
from shared.protocol.ids import BlockKey

TRACE_BLOCK_TOKENS = 512
TimeUnit = Literal["s", "ms", "us"]
PER_SECOND: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6}
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
DENSE_PER_S = 1000.0
"""More requests a second than that look like a wrong time unit."""
ROWS_TO_JUDGE = 20


class TraceRow(Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceRequest(Struct, frozen=True):
    """One request to replay."""

    number: int
    arrival_s: float
    """From the first request's arrival on."""
    prompt_tokens: int
    output_tokens: int
    block_keys: tuple[BlockKey, ...]
    """Of the full blocks only: a partial one is never shared."""


class TraceFormat(Struct, frozen=True, kw_only=True):
    """How a trace is to be understood."""

    time_unit: TimeUnit = "ms"
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens that one hash id stands for."""
    sort: bool = False
    """Whether rows may be out of order; they are put in order of time."""


AS_PUBLISHED = TraceFormat()
"""The format of the traces that came with the papers."""


def read_trace(
    path: Path, *, speed: float = 1.0, requests: int = 0, form: TraceFormat = AS_PUBLISHED
) -> list[TraceRequest]:
    """All requests, or the first `requests`. Divides arrival times by `speed`. Raises Invalid naming file and line."""
    with _opened(path) as lines:
        return parse_trace(lines, name=path.name, speed=speed, requests=requests, form=form)


def read_rows(path: Path, form: TraceFormat = AS_PUBLISHED) -> list[TraceRow]:
    """The rows as they are. Raises Invalid naming file and line."""
    with _opened(path) as lines:
        return list(_rows(lines, path.name, form))


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    """Plain or gzipped. Raises Invalid."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == GZIP
        with gzip.open(path) if zipped else path.open("rb") as lines:
            yield lines
    except (OSError, EOFError) as e:
        raise Invalid(f"trace {path}: {getattr(e, 'strerror', None) or e}", param="trace") from e


def parse_trace(
    lines: Iterable[bytes],
    *,
    name: str = "trace",
    speed: float = 1.0,
    requests: int = 0,
    form: TraceFormat = AS_PUBLISHED,
) -> list[TraceRequest]:
    """As read_trace. Raises Invalid for a trace without requests, too."""
    rows = list(_rows(lines, name, form))
    if not rows:
        raise Invalid(f"{name} has no request", param="trace")
    if form.sort:
        rows.sort(key=lambda row: row.timestamp)
    if requests:
        rows = rows[:requests]
    key_of = _Keys().__getitem__
    first, per_second = rows[0].timestamp, PER_SECOND[form.time_unit] * speed
    return [
        TraceRequest(
            number=number,
            arrival_s=(row.timestamp - first) / per_second,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            block_keys=tuple(map(key_of, row.hash_ids[: row.input_length // form.block_tokens])),
        )
        for number, row in enumerate(rows)
    ]


def doubts(requests: list[TraceRequest], speed: float, form: TraceFormat) -> str:
    """What looks like a misunderstanding, for people; empty if nothing does."""
    span_s = requests[-1].arrival_s * speed
    if form.time_unit != "s" and len(requests) >= ROWS_TO_JUDGE and len(requests) > span_s * DENSE_PER_S:
        return f"{len(requests)} requests within {span_s:.3g} s: if the timestamps are seconds, say --time-unit s"
    return ""


def _rows(lines: Iterable[bytes], name: str, form: TraceFormat) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(TraceRow)
    last = float("-inf")
    for line_number, line in enumerate(lines, 1):
        if line_number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        where = f"{name}, line {line_number}"
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as e:
            raise Invalid(f"{where}: {e}", param="trace") from e
        if problem := _problem(row, last, form):
            raise Invalid(f"{where}: {problem}", param="trace")
        if not form.sort:
            last = row.timestamp
        yield row


def _problem(row: TraceRow, last_timestamp: float, form: TraceFormat) -> str:
    if row.timestamp < 0:
        return f"timestamp {row.timestamp:g} is negative"
    if row.timestamp < last_timestamp:
        return f"timestamp {row.timestamp:g} is before the previous one; --sort puts rows in order"
    if row.input_length < 1 or row.output_length < 1:
        return "input_length and output_length must be at least 1"
    blocks, ids = blocks_for(row.input_length, form.block_tokens), len(row.hash_ids)
    if ids != blocks:
        fitting = _block_tokens_of(row)
        hint = f"; blocks of {fitting} tokens would fit: --block-tokens {fitting}" if fitting else ""
        return (
            f"{ids} hash_ids for {row.input_length} tokens; there must be {blocks} with blocks of "
            f"{form.block_tokens} tokens{hint}"
        )
    if min(row.hash_ids) < 0 or max(row.hash_ids) >= 1 << 64:
        return "hash_ids must be unsigned 64-bit numbers"
    return ""


def _block_tokens_of(row: TraceRow) -> int:
    """A usual block length that fits the row; 0 if none does."""
    sizes = (16, 32, 64, 128, 256, 512, 1024)
    return next((n for n in sizes if blocks_for(row.input_length, n) == len(row.hash_ids)), 0)


class _Keys(dict[int, BlockKey]):
    """Keys are shared: one object for each block, however many prompts have it."""

    def __missing__(self, hash_id: int) -> BlockKey:
        key = self[hash_id] = hash_id.to_bytes(KEY_BYTES, "big")
        return key
