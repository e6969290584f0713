"""What a prefill node can be told."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from shared.core.worker.config import PrefillConfig
from shared.engine.api import EngineConfig
from shared.io.config import Count
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import Incarnation
from shared.protocol.model import ModelSpec
from shared.worker_node.config import NodeConfig

STEP_TOKENS = 512
STAGED_STEP_TOKENS = 8192


class Config(NodeConfig, frozen=True, kw_only=True):
    max_running: Count = 4
    """Most prompts that load or compute at once and hold pages; further ones wait."""
    graph_rows: Annotated[int, Meta(ge=0, le=1024)] = 0
    """As on a decode node. Prompts are never captured in graphs, so a prefill node gains nothing."""
    chunk_tokens: Annotated[int, Meta(ge=0)] = 0
    """Most prompt tokens of one engine step; 0: 512, or 8192 with stages, so that the pipeline stays full."""
    stages: Count = 1
    """Processes that each compute a slice of the layers with `threads` threads; pieces of a prompt pass through them."""
    piece_tokens: Count = 256
    """Tokens that pass from stage to stage in one piece."""

    def engine_config(self) -> EngineConfig:
        return replace(super().engine_config(), stages=self.stages, piece_tokens=self.piece_tokens)

    @property
    def step_tokens(self) -> int:
        return self.chunk_tokens or (STEP_TOKENS if self.stages == 1 else STAGED_STEP_TOKENS)

    def machine(
        self, spec: ModelSpec, pages: int, incarnation: Incarnation, cost: CostCoefficients, host: str = ""
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
            chunk_tokens=self.step_tokens,
            gateway_lease_s=self.gateway_lease_s,
            eviction=self.eviction,
            cost=cost,
            host=host,
        )
