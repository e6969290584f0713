"""What a node that computes can be told; prefill and decode add to it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.engine.api import STAGING_BYTES, EngineConfig
from shared.io.config import BaseConfig, Count, CountOrZero, PositiveS
from shared.io.models import DEFAULT_MODEL


class NodeConfig(BaseConfig, frozen=True, kw_only=True):
    model: str = DEFAULT_MODEL
    """Alias, folder in Hugging Face format, hub id, or `toy`."""
    engine: str = "auto"
    """What computes the model: auto, or `module:Class` of an engine of your own (engine.api.Engine)."""
    dtype: str = "auto"
    """Of weights and KV: auto, float32, bfloat16, float16."""
    block_tokens: Count = 16
    """Tokens of one KV block; the same on all nodes."""
    kv_bytes: Count = 1 << 30
    """Memory for KV pages; all of it is taken at start."""
    threads: CountOrZero = 0
    """Of the engine; 0: the library's default."""
    salt: str = ""
    """Separates KV namespaces, e.g. of tenants; the same on all nodes."""
    backend: str = "auto"
    """Attention backend: auto, cpu, flashinfer."""
    graph_rows: Annotated[int, Meta(ge=0, le=1024)] = 64
    """On a GPU: sequences of the largest decode step that is captured as a CUDA graph, at start; larger ones are launched
    kernel by kernel. 0: all are."""
    staging_bytes: Annotated[int, Meta(ge=1 << 20)] = STAGING_BYTES
    """On a GPU: page-locked host memory that KV passes through to and from the shared memory."""
    max_waiting: Count = 256
    """Requests beyond the running ones that are taken in; more are refused as overloaded."""
    eviction: str = "lru"
    """Which cached block goes when room is needed: lru, fifo, or `module:Class` of your own."""
    gateway_lease_s: PositiveS = 10.0
    """A gateway silent for so long is gone, and its requests are cancelled."""
    wedged_after_s: PositiveS = 60.0
    """An engine step that takes longer turns the node off ready until it ends."""
    layerwise: bool = True
    """Send each layer's KV while the next ones are computed; off: all of it after the prompt, to compare."""
    shm: bool = True
    """Move KV by shared memory to and from processes of the same host."""
    transports: str = ""
    """More ways to move KV, preferred to shared memory and TCP: `module:Class` of your own, separated by commas."""

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            engine=self.engine,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            kv_bytes=self.kv_bytes,
            threads=self.threads,
            salt=self.salt,
            backend=self.backend,
            graph_rows=self.graph_rows,
            staging_bytes=self.staging_bytes,
        )
