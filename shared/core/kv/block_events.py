"""Cuts what a node says about its blocks into messages that the bus can carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.core.kv.block_keys import KEY_BYTES
from shared.core.machine import Command, Event
from shared.protocol.cluster import BlockSnapshotPart
from shared.protocol.ids import BlockKey, Incarnation, NodeId


class SnapshotWanted(Event, frozen=True):
    pass


class PublishBlocks(Command, frozen=True):
    """Tell the index which blocks became readable here or went away."""

    seq: int
    stored: tuple[BlockKey, ...]
    removed: tuple[BlockKey, ...]


class PublishSnapshot(Command, frozen=True):
    seq: int
    keys: tuple[BlockKey, ...]


WIRE_KEY_BYTES = KEY_BYTES + 2
"""A key in msgpack."""
ENVELOPE_BYTES = 1024
"""Room for everything else in the message."""


def keys_per_message(max_payload_bytes: int) -> int:
    return max(1, (max_payload_bytes - ENVELOPE_BYTES) // WIRE_KEY_BYTES)


def snapshot_parts(
    node: NodeId, incarnation: Incarnation, seq: int, keys: Sequence[BlockKey], max_payload_bytes: int
) -> Iterator[BlockSnapshotPart]:
    """At least one part, also of nothing: it says that nothing is held."""
    step = keys_per_message(max_payload_bytes)
    parts = max(1, -(-len(keys) // step))
    for part in range(parts):
        mine = tuple(keys[part * step : (part + 1) * step])
        yield BlockSnapshotPart(
            node=node, incarnation=incarnation, seq=seq, part=part, parts=parts, keys=mine
        )
