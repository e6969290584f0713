"""The engine interface that services use, independent of the implementation."""

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
    """Memory for KV pages. All of it is touched at start, so it is resident from then on."""
    threads: int = 0
    """0: torch's default."""
    salt: str = ""
    """Separates namespaces, e.g. of tenants."""
    backend: str = "auto"
    """The compute backend: auto, cpu, flashinfer; all of them are in hardware.BACKENDS."""
    graph_rows: int = 64
    """Sequences in the largest decode step that is captured as a CUDA graph; 0: none is captured. GPUs only."""
    staging_bytes: int = STAGING_BYTES
    """Page-locked host memory through which KV is copied between a GPU and the shared memory."""
    stages: int = 1
    """Number of processes that each compute a part of the layers, with `threads` threads each."""
    piece_tokens: int = 256
    """Tokens that are passed from one stage to the next at a time."""
    engine: str = "auto"
    """auto: chosen by the model. Or `module:Class`: the engine is created by `Class.load(config, progress)`."""


class EngineLost(Exception):
    """The engine can never run again. A new process is needed to get a working one."""


class Engine(Protocol):
    """One model on one device with its KV pages. Not thread-safe: one `run` at a time, in any one thread."""

    spec: ModelSpec
    store: PageStore

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        """Run one step over the batch. Results are in the order of `sequences`. Blocks the calling thread.

        Calls on_layer(i) for each layer in order, as soon as layer i's K and V of all the step's tokens are in the
        pages. A sequence's tokens depend only on its own token ids, positions, KV and sampling, never on the other
        sequences (bit-equal for the toy engine; up to floating-point rounding of the logits for models).
        If only one sequence fails, its result has `error`. If `run` raises, the whole step is void; if it raises
        EngineLost, the engine is lost too.
        """
        ...

    def fault(self) -> str:
        """Why the engine can never run again; empty while it can. Any thread may call this, even during a run."""
        ...

    def close(self) -> None: ...
