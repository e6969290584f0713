"""Ids of nodes, requests, attempts and blocks.

Every process start has an incarnation, and every try of a request has an attempt id. Everything in flight carries both,
so that leftovers of an earlier life or an earlier try are recognised and rejected.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

NodeId = str
"""A service instance's configured name, e.g. `decode-0`. Survives restarts."""

Incarnation = str
"""One process start of a node; 16 hex digits, random."""

RequestId = str
"""One client request; a UUID."""

AttemptId = str
"""One try at one choice of a request: `<request>/<choice>/<attempt>`. Minted once, never reused."""

BlockKey = bytes
"""16 bytes: blake2b-128 over parent key and token ids, rooted in a namespace digest (see core.kv.block_keys)."""

LandingId = bytes
"""16 bytes that name room reserved at a receiver. A writer must know the id of an open landing to write into it."""

Role = Literal["gateway", "conductor", "prefill", "decode", "cache"]


class NodeRef(Struct, frozen=True):
    """One life of a node and where its data plane listens."""

    node: NodeId
    incarnation: Incarnation
    tcp: str = ""
    """`host:port` of its TCP data plane; empty if it has none."""
    shm: str = ""
    """Name of its abstract unix socket for same-host shared-memory transfers; empty if it has none."""
    host: str = ""
    """The machine it is on. Nodes with equal hosts may use shared memory."""
    addresses: dict[str, str] = {}
    """Where its other transports listen, by scheme."""

    def address(self, scheme: str) -> str:
        """Where its data plane listens with that transport; empty if it does not."""
        if scheme == "tcp":
            return self.tcp
        if scheme == "shm":
            return self.shm
        return self.addresses.get(scheme, "")


def node_ref(node: NodeId, incarnation: Incarnation, host: str, addresses: Mapping[str, str]) -> NodeRef:
    """The life of a node that listens at these addresses, by scheme."""
    more = {scheme: address for scheme, address in addresses.items() if scheme not in ("tcp", "shm")}
    return NodeRef(node, incarnation, addresses.get("tcp", ""), addresses.get("shm", ""), host, more)


def new_incarnation() -> Incarnation:
    return uuid.uuid4().hex[:16]


REQUEST_ID_CHARS = 128
"""Longest name that a client may give a request: it is in every log line and event of it."""


def new_request_id() -> RequestId:
    return str(uuid.uuid4())


def attempt_id(request: RequestId, choice: int, attempt: int) -> AttemptId:
    return f"{request}/{choice}/{attempt}"


def request_of(attempt: AttemptId) -> RequestId:
    return attempt.split("/", 1)[0]


def previous_attempt(attempt: AttemptId) -> AttemptId:
    """The attempt before this one at the same choice; empty if it is the first, or no attempt's name."""
    choice, _, number = attempt.rpartition("/")
    return f"{choice}/{int(number) - 1}" if number.isdecimal() and int(number) > 0 else ""
