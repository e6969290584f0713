"""`python -m shared.engine.pipeline.stage`: a child of a node that computes some of its layers.

It ends as soon as any process it is linked to has gone, in the middle of a computation too.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
from pathlib import Path
from typing import Any

import torch

from shared.dataplane.arena import Arena
from shared.dataplane.memory import MappedMemory
from shared.engine import hf
from shared.engine.attention.api import AttentionBatch
from shared.engine.native.kernels import load
from shared.engine.paged import DTYPES, arena_layers
from shared.engine.paths.lean import LeanPath
from shared.engine.pipeline.link import Link, LinkClosed, read_ahead
from shared.engine.pipeline.messages import Answer, LayerWritten, PieceDone, Ready, Rows, Setup
from shared.io.parent import die_with_parent

AHEAD = 4
"""Pieces that may wait in front of a stage."""


class Stage:
    """One slice of the layers over the node's pages."""

    def __init__(
        self, setup: Setup, memory_fd: int, control: Link[Setup], onward: Link[Answer] | None
    ) -> None:
        """`onward`: to the next stage; None: this one is the last."""
        self._control = control
        self._onward = onward
        memory = MappedMemory(memory_fd, setup.pages * setup.layout.block_bytes)
        layers = arena_layers(Arena(setup.layout, setup.pages, memory=memory))
        torch.set_num_threads(setup.threads)
        model = hf.load_model(Path(setup.folder), DTYPES[setup.dtype], torch.device("cpu"))
        self._path = LeanPath(model, setup.shape, layers, load(setup.kernels), setup.part)

    def take(self, piece: Rows, payload: bytearray) -> None:
        """Compute a piece, and pass on what comes out."""
        tokens = sum(span.tokens for span in piece.spans)
        x = torch.frombuffer(payload, dtype=torch.float32).view(tokens, -1)

        def after_layer(layer: int) -> None:
            self._control.send(LayerWritten(piece.step, layer))

        with torch.inference_mode():
            self._path.advance(AttentionBatch(piece.spans), x, after_layer if piece.ends_step else None)
            if self._onward is not None:
                self._onward.send(piece, memoryview(payload))
                return
            kept = x[list(piece.keep)]
            logits = self._path.project(kept) if piece.keep else kept
        self._control.send(PieceDone(), raw(logits))


def raw(rows: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    array: Any = rows.contiguous().numpy()
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def _gone(*_: object) -> None:
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("parent-pid", "memory-fd", "control-fd", "previous-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--next-fd", type=int, default=-1)
    told = parser.parse_args()
    die_with_parent(told.parent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):  # the node's to hear: it lets running steps end
        signal.signal(signum, signal.SIG_IGN)
    control: Link[Setup] = Link(socket.socket(fileno=told.control_fd), Setup)
    previous: Link[Rows] = Link(socket.socket(fileno=told.previous_fd), Rows)
    onward: Link[Answer] | None = None
    if told.next_fd >= 0:
        onward = Link(socket.socket(fileno=told.next_fd), Answer)
    waiting: queue.Queue[tuple[Rows, bytearray]] = queue.Queue(AHEAD)
    try:
        setup, _ = control.receive()
        read_ahead(control, _gone, _gone)
        read_ahead(previous, waiting.put, _gone)
        stage = Stage(setup, told.memory_fd, control, onward)
        control.send(Ready())
        while True:
            stage.take(*waiting.get())
    except LinkClosed:
        _gone()


if __name__ == "__main__":
    main()
