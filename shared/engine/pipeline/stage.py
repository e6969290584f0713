"""`python -m shared.engine.pipeline.stage`: a node's child process that computes some of the model's layers.

It ends as soon as any process it is linked to has gone, even in the middle of a computation.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
from pathlib import Path

import torch

from shared.dataplane.memory.anonymous import MappedMemory
from shared.dataplane.memory.arena import Arena
from shared.engine.attention.api import AttentionBatch
from shared.engine.kv.paged import DTYPES, arena_layers
from shared.engine.native.kernels import load
from shared.engine.paths.lean import LeanPath
from shared.engine.pipeline.channel import ChannelClosed, StageChannel, raw, read_ahead
from shared.engine.pipeline.messages import FOLLOWED, LayerWritten, PieceDone, Reached, Ready, Rows, Setup
from shared.engine.pipeline.onward import Onward
from shared.engine.pipeline.seam import MOST_WAITING, Reports, Seam
from shared.engine.weights import transformers as hf
from shared.io.parent import die_with_parent


class Stage:
    """One slice of the layers, over the node's pages."""

    def __init__(
        self, setup: Setup, memory_fd: int, control: StageChannel[Setup], previous: StageChannel[Rows]
    ) -> None:
        self._control = control
        self._previous = previous
        self._reports = Reports(setup.part.previous_end, setup.part.earliest_end)
        memory = MappedMemory(memory_fd, setup.pages * setup.layout.block_bytes)
        layers = arena_layers(Arena(setup.layout, setup.pages, memory=memory))
        torch.set_num_threads(setup.threads)
        model = hf.load_model(Path(setup.folder), DTYPES[setup.dtype], torch.device("cpu"))
        self._path = LeanPath(model, setup.shape, layers, load(setup.kernels), setup.part.layers)

    def take(self, rows: Rows, payload: bytearray, onward: Onward | None) -> None:
        """Compute a piece. Send the rows `onward` to the next stage; if `onward` is None, this is the last stage, and the
        logits go to the node."""
        self._previous.send(Reached(*self._reports.begin(rows.layer)))
        tokens = sum(span.tokens for span in rows.spans)
        x = torch.frombuffer(payload, dtype=torch.float32).view(tokens, -1)

        def after_layer(layer: int) -> None:
            if (reached := self._reports.wrote(layer)) is not None:
                self._previous.send(Reached(*reached))
            if rows.ends_step:
                self._control.send(LayerWritten(rows.step, layer))

        with torch.inference_mode():
            entered = self._path.enter(AttentionBatch(rows.spans), x)
            if onward is not None:
                onward.carry(rows, x, lambda layers: entered.through(layers, after_layer))
                return
            logits = self._path.finish(entered, rows.layer, rows.keep, after_layer)
        self._control.send(PieceDone(), raw(logits))


def _gone(*_: object) -> None:
    os._exit(FOLLOWED)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("parent-pid", "memory-fd", "control-fd", "previous-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--next-fd", type=int, default=-1)
    told = parser.parse_args()
    die_with_parent(told.parent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):  # only the node handles them: it lets running steps finish
        signal.signal(signum, signal.SIG_IGN)
    control: StageChannel[Setup] = StageChannel(socket.socket(fileno=told.control_fd), Setup)
    previous: StageChannel[Rows] = StageChannel(socket.socket(fileno=told.previous_fd), Rows)
    waiting: queue.Queue[tuple[Rows, bytearray]] = queue.Queue(MOST_WAITING)
    try:
        setup, _ = control.receive()
        read_ahead(control, _gone, _gone)
        read_ahead(previous, waiting.put, _gone)
        stage = Stage(setup, told.memory_fd, control, previous)
        control.send(Ready())
        # Watch the next stage only from now on. If that one cannot load, this one must not end first: the node should
        # name the stage that could not load.
        onward: Onward | None = None
        if told.next_fd >= 0:
            link: StageChannel[Reached] = StageChannel(socket.socket(fileno=told.next_fd), Reached)
            onward = Onward(link, Seam(setup.part.earliest_end, setup.part.end), _gone)
        while True:
            stage.take(*waiting.get(), onward)
    except ChannelClosed:
        _gone()


if __name__ == "__main__":
    main()
