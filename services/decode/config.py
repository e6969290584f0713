"""What a decode node can be told."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.core.worker.config import DecodeConfig
from shared.io.config import Count, PositiveS
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import Incarnation
from shared.protocol.model import ModelSpec
from shared.worker_node.config import NodeConfig


class Config(NodeConfig, frozen=True, kw_only=True):
    max_running: Count = 64
    """Most sequences in one step."""
    max_waiting: Count = 64
    """Most reservations beyond those; further ones are refused as overloaded."""
    chunk_tokens: Count = 256
    """Most prompt tokens that a step computes beside decoding, when this node prefills itself."""
    headroom_tokens: Annotated[int, Meta(ge=0)] = 256
    """Answer tokens for which room is reserved together with the prompt; more room is taken as needed."""
    reservation_lease_s: PositiveS = 30.0
    """Longest silence, in seconds, of a prefill node that has begun to write."""

    def machine(
        self, spec: ModelSpec, pages: int, incarnation: Incarnation, cost: CostCoefficients, host: str = ""
    ) -> DecodeConfig:
        return DecodeConfig(
            node=self.node,
            incarnation=incarnation,
            namespace=spec.namespace,
            block_tokens=spec.layout.block_tokens,
            pages=pages,
            context_tokens=spec.context_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            chunk_tokens=self.chunk_tokens,
            gateway_lease_s=self.gateway_lease_s,
            eviction=self.eviction,
            cost=cost,
            host=host,
            headroom_tokens=self.headroom_tokens,
            reservation_lease_s=self.reservation_lease_s,
        )
