"""Every NATS subject, built here and nowhere else.

The major version is in the subject. Node names are encoded so that no name can inject a token, a wildcard or a space.
"""

from __future__ import annotations

from shared.protocol.ids import NodeId, Role

PREFIX = "tsukimi.v1"

ANNOUNCE = f"{PREFIX}.node.announce"
"""Pub NodeInfo: at start, on every stage change, after a reconnect, and when asked by ROLL_CALL."""
LEAVE = f"{PREFIX}.node.leave"
"""Pub NodeLeft: a graceful end."""
ROLL_CALL = f"{PREFIX}.node.roll_call"
"""Pub RollCall: every node announces itself now (so that a late joiner learns of all nodes)."""
HEARTBEAT_ALL = f"{PREFIX}.heartbeat.*.*"
PLACE = f"{PREFIX}.conductor.place"
"""Req PlaceRequest -> Placement | WireError. Queue group `conductor`."""
PLACE_GIVEN_UP = f"{PREFIX}.conductor.given_up"
"""Pub PlaceGivenUp: an answer came too late. From: gateways. To: every conductor."""
BLOCKS_ALL = f"{PREFIX}.blocks.*"
GENERATE = f"{PREFIX}.generate"
"""Req GenerateCall (public): any gateway answers, queue group `gateway`; GenerateEvents stream to the reply subject."""
GENERATE_CANCEL = f"{PREFIX}.generate.cancel"
"""Pub GenerateCancel (public): ends a generation started over GENERATE."""

QUEUE_CONDUCTOR = "conductor"
QUEUE_GATEWAY = "gateway"


def encode(name: str) -> str:
    """A subject token for any name: letters, digits, `-` and `_` stay, other bytes become `=xx`. Injective."""
    if not name:
        raise ValueError("a node name must not be empty")
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "-_") else "".join(f"={b:02x}" for b in c.encode())
        for c in name
    )


def heartbeat(role: Role, node: NodeId) -> str:
    """Pub NodeLoad."""
    return f"{PREFIX}.heartbeat.{role}.{encode(node)}"


def heartbeats_of(role: Role) -> str:
    return f"{PREFIX}.heartbeat.{role}.*"


def blocks(node: NodeId) -> str:
    """Pub BlockEvents | BlockSnapshotPart, one ordered stream per node."""
    return f"{PREFIX}.blocks.{encode(node)}"


def snapshot(node: NodeId) -> str:
    """Pub SnapshotAsked: the node publishes its snapshot's parts on its `blocks` subject."""
    return f"{PREFIX}.node.{encode(node)}.snapshot"


def prefill(node: NodeId) -> str:
    """Req PrefillJob -> Accepted | WireError."""
    return f"{PREFIX}.node.{encode(node)}.prefill"


def reserve(node: NodeId) -> str:
    """Req ReserveRequest -> Reserved | WireError."""
    return f"{PREFIX}.node.{encode(node)}.reserve"


def cancel(node: NodeId) -> str:
    """Pub CancelAttempt. Idempotent; unknown attempts are ignored and counted."""
    return f"{PREFIX}.node.{encode(node)}.cancel"


def sync(node: NodeId) -> str:
    """Req SyncRequest -> AttemptState: what the node knows about an attempt, with its tokens from an index on."""
    return f"{PREFIX}.node.{encode(node)}.sync"


def tokens(gateway: NodeId) -> str:
    """Pub TokenBatch to the gateway that owns the requests."""
    return f"{PREFIX}.gateway.{encode(gateway)}.tokens"
