"""Splits a node's block events and snapshots into messages that fit the bus."""

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
"""Encoded size of a key in msgpack."""
ENVELOPE_BYTES = 1024
"""Room for everything else in the message."""


def keys_per_message(max_payload_bytes: int) -> int:
    return max(1, (max_payload_bytes - ENVELOPE_BYTES) // WIRE_KEY_BYTES)


def snapshot_parts(
    node: NodeId, incarnation: Incarnation, seq: int, keys: Sequence[BlockKey], max_payload_bytes: int
) -> Iterator[BlockSnapshotPart]:
    """Yields at least one part. With no keys, that part is empty and says that the node holds nothing."""
    step = keys_per_message(max_payload_bytes)
    parts = max(1, -(-len(keys) // step))
    for part in range(parts):
        mine = tuple(keys[part * step : (part + 1) * step])
        yield BlockSnapshotPart(
            node=node, incarnation=incarnation, seq=seq, part=part, parts=parts, keys=mine
        )
