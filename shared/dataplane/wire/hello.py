"""Who may talk to whom: the rules of the handshake."""

from __future__ import annotations

from msgspec import Struct

from shared.dataplane.wire.frames import Hello
from shared.protocol.errors import Refused, TsukimiError, Unavailable
from shared.protocol.ids import Incarnation, NodeId
from shared.protocol.model import KVLayout


class Identity(Struct, frozen=True):
    """One end of a connection."""

    node: NodeId
    incarnation: Incarnation
    namespace: bytes = b""
    """Empty: any."""


def judge(hello: Hello, me: Identity, layout: KVLayout) -> TsukimiError | None:
    """Why the caller must be turned away, or None. Whatever differs is named with both values."""
    if (hello.target, hello.target_incarnation) != (me.node, me.incarnation):
        return Unavailable(
            f"{hello.node} means life {hello.target_incarnation} of {hello.target}, "
            f"but this is life {me.incarnation} of {me.node}"
        )
    if hello.layout != layout:
        return Refused(
            f"KV layouts differ: {hello.node} has {describe(hello.layout)}, {me.node} has {describe(layout)}"
        )
    if hello.namespace and me.namespace and hello.namespace != me.namespace:
        return Refused(
            f"KV namespaces differ (weights, dtype, rope or salt): {hello.node} has {hello.namespace.hex()}, "
            f"{me.node} has {me.namespace.hex()}"
        )
    return None


def describe(layout: KVLayout) -> str:
    return (
        f"[{layout.layers} layers, {layout.block_tokens} tokens, {layout.kv_heads} heads, {layout.head_dim}] "
        f"of {layout.dtype} ({layout.dtype_bytes} bytes)"
    )
