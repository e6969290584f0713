"""What a prefill node can be told."""

from __future__ import annotations

from shared.core.prefill import PrefillConfig
from shared.engine.node_config import Count, NodeConfig
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import Incarnation
from shared.protocol.model import ModelSpec


class Config(NodeConfig, frozen=True, kw_only=True):
    max_running: Count = 4
    """Prompts that hold pages and load or compute; the others wait in line."""
    chunk_tokens: Count = 512
    """Most prompt tokens of one engine step."""

    def machine(
        self, spec: ModelSpec, pages: int, incarnation: Incarnation, cost: CostCoefficients
    ) -> PrefillConfig:
        return PrefillConfig(
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
        )
