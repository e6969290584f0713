"""Snapshots in parts that fit the bus."""

from __future__ import annotations

import pytest

from shared.core.kv.block_events import snapshot_parts
from shared.protocol.wire import encode

KEYS = [i.to_bytes(16, "big") for i in range(5000)]


@pytest.mark.parametrize("count", [0, 1, 500, 5000])
def test_every_part_fits_and_together_they_are_everything(count: int) -> None:
    parts = list(snapshot_parts("c" * 200, "1" * 16, 7, KEYS[:count], 8192))
    assert [part.part for part in parts] == list(range(len(parts)))
    assert {part.parts for part in parts} == {len(parts)}
    assert {part.seq for part in parts} == {7}
    assert all(len(encode(part)) <= 8192 for part in parts)
    assert [key for part in parts for key in part.keys] == KEYS[:count]
