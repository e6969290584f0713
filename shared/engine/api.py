"""What a service may ask of an engine, whatever computes inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.dataplane.api import PageStore
from shared.protocol.model import ModelSpec

Progress = Callable[[str, float], None]
"""Hears what is being done, and which fraction of it is."""
OnLayer = Callable[[int], None]
"""Hears that a layer of the step has been computed."""
STAGING_BYTES = 64 << 20


class EngineConfig(Struct, frozen=True):
    model: str
    """`toy`, an alias, a Hugging Face folder, or a hub id."""
    dtype: str = "auto"
    """auto: bfloat16 where the CPU computes it natively or on a GPU, else float32."""
    block_tokens: int = 16
    kv_bytes: int = 1 << 30
    """Memory for KV pages; touched at start."""
    threads: int = 0
    """0: torch's default."""
    salt: str = ""
    """Separates namespaces, e.g. of tenants."""
    backend: str = "auto"
    """What computes: auto, cpu, flashinfer; more in hardware.BACKENDS."""
    graph_rows: int = 64
    """Sequences of the largest decode step that is captured as a CUDA graph; 0: none is. On GPUs only."""
    staging_bytes: int = STAGING_BYTES
    """Page-locked host memory that KV passes through between a GPU and the shared memory."""
    stages: int = 1
    """Processes that each compute a part of the layers; `threads` each."""
    piece_tokens: int = 256
    """Tokens that go from one stage to the next together."""
    engine: str = "auto"
    """auto: by the model; or `module:Class`, made by `Class.load(config, progress)`."""


class EngineLost(Exception):
    """The engine can never run again: whoever needs one starts a new process."""


class Engine(Protocol):
    """One model on one device with its KV pages. Not thread-safe: one `run` at a time, in any one thread."""

    spec: ModelSpec
    store: PageStore

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        """Run one step over the batch; results in order. Blocks the calling thread.

        It calls on_layer(i) in order, as soon as it can: by then layer i's K and V of all the step's tokens are in the
        pages. Tokens depend on a sequence's own token ids, positions, KV and sampling alone, never on neighbours
        (bit-equal for the toy engine; up to floating-point rounding of the logits for models).
        A sequence that alone goes wrong gets `error`; anything that raises means the whole step is void, and EngineLost
        that so is the engine.
        """
        ...

    def fault(self) -> str:
        """Why the engine can never run again; empty while it can. Any thread may ask, during a run too."""
        ...

    def close(self) -> None: ...
