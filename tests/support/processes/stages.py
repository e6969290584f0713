"""Helpers for tests of groups of stage processes."""

from __future__ import annotations

from pathlib import Path

import psutil

from shared.engine.api import Engine, EngineConfig
from shared.engine.load import load_engine

MB = 1 << 20
PIECE = 128


def load(model: str | Path, stages: int, kv_bytes: int = 4 * MB, backend: str = "cpu") -> Engine:
    config = EngineConfig(
        str(model),
        "float32",
        kv_bytes=kv_bytes,
        threads=1,
        stages=stages,
        piece_tokens=PIECE,
        backend=backend,
    )
    return load_engine(config, lambda what, fraction: None)


def children() -> list[psutil.Process]:
    """The live stage processes that this process has started."""
    return [p for p in psutil.Process().children() if is_stage(p)]


def is_stage(process: psutil.Process) -> bool:
    """Whether the process is a live stage of any group."""
    try:
        return "shared.engine.pipeline.stage" in process.cmdline()  # empty for a zombie
    except psutil.NoSuchProcess:
        return False
