"""A file of everything a machine was fed and what it ordered, so that a live run can be replayed.

Records are length-prefixed msgpack of (now, event, commands). Each is written at once, in one piece. However the
process ends, at most the last record is cut, and reading stops before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")


class Recorder:
    """Appends to its file. A write blocks its caller while it copies into the page cache: for experiments only."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115  (open for the object's life)
        self._encoder = msgspec.msgpack.Encoder()

    def record(self, now: float, event: Any, commands: Sequence[Any]) -> None:
        body = self._encoder.encode((now, event, commands))
        self._file.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def read_recording(path: str | Path, events: Any, commands: Any) -> Iterator[tuple[float, Any, list[Any]]]:
    """The records, in order. `events` and `commands` are unions of the machine's types. A cut tail is ignored."""
    decoder = msgspec.msgpack.Decoder(tuple[float, events, list[commands]])
    with Path(path).open("rb") as file:
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            body = file.read(length)
            if len(body) < length:
                return
            yield decoder.decode(body)
