"""What a gateway can be told."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.io.config import BaseConfig, Count, PositiveS


class GatewayConfig(BaseConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port of HTTP and WebSocket, on the address `bind`; 0: a free one."""
    model: str = ""
    """The model's tokenizer on this machine, if it is not where the nodes have it: an alias, folder or hub id."""
    max_running: Count = 512
    """Most choices generated at once; further requests are answered 429."""
    max_body_bytes: Count = 1 << 20
    """Largest request body in bytes; larger ones are answered 413."""
    buffer_bytes: Count = 256 << 10
    """Most bytes of text that wait for one slow client; beyond that, its request is cancelled."""
    keep_alive_s: PositiveS = 10.0
    """Seconds without news on a stream after which a sign of life is sent."""
    stalled_s: PositiveS = 60.0
    """A client that takes nothing for this many seconds is cut off."""
    budget_s: PositiveS = 600.0
    """A request that has not ended after this many seconds fails."""
    idle_sync_s: PositiveS = 1.0
    """Seconds of silence after which a node is asked what became of a request."""
    call_s: PositiveS = 5.0
    """Longest wait, in seconds, for the conductor's or a node's answer to one question."""
