"""The node's side of a group. The node computes stage 0 itself; the other stages are its child processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from shared.dataplane.memory.arena import Arena
from shared.engine.api import EngineConfig, EngineLost
from shared.engine.attention.api import AttentionBatch, AttentionShape
from shared.engine.native.kernels import Kernels
from shared.engine.paths.api import AfterLayer
from shared.engine.paths.lean import LeanPath
from shared.engine.pipeline.channel import ChannelClosed, read_ahead
from shared.engine.pipeline.children import END_S, Child, start
from shared.engine.pipeline.messages import Answer, LayerWritten, PieceDone, Rows, Setup
from shared.engine.pipeline.onward import Onward
from shared.engine.pipeline.seam import Seam
from shared.engine.pipeline.slices import Piece, layer_slices, pieces

log = structlog.get_logger(__name__)


class GroupPath:
    """Implements paths.api.Forward. It computes the same bits as LeanPath.

    If any child is lost, the whole group is lost. After an error of this stage or of after_layer the group is still
    usable. By the time the error is raised, all pieces are done: no stage writes into the step's pages any more.
    """

    def __init__(
        self,
        own: LeanPath,
        layers: int,
        children: Sequence[Child],
        onward: Onward,
        piece_tokens: int,
        block_tokens: int,
    ) -> None:
        """The children must be ready; the group owns and closes them. `layers` is the model's number of layers."""
        self._own = own
        self._layers = layers
        self._children = children
        self._onward = onward
        self._piece_tokens = piece_tokens
        self._block_tokens = block_tokens
        self._step = 0
        self._under_way = 0
        """Pieces that were handed on and whose PieceDone has not arrived."""
        self._fault = ""
        self._losing = threading.Lock()
        self._is_lost = threading.Event()
        self._closing = False
        self._answers: queue.SimpleQueue[tuple[Answer, bytearray] | None] = queue.SimpleQueue()
        """None: the group is lost."""
        for child in children:
            read_ahead(child.control, self._answers.put, lambda child=child: self._lose(child))  # type: ignore[misc]

    def logits(
        self,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        keep: torch.Tensor,
        after_layer: AfterLayer | None,
    ) -> torch.Tensor:
        tell = after_layer or _nothing
        cut = pieces(batch, self._piece_tokens, self._block_tokens)
        kept = [_kept(piece, keep.tolist()) for piece in cut]
        self._step += 1
        try:
            border = 0
            for piece, its in zip(cut, kept, strict=True):
                border = self._pass_on(piece, token_ids, its, piece is cut[-1])
            # Only now, when the other stages have all pieces: they compute while this KV is sent.
            for layer in range(border):
                tell(layer)
            return self._collect(kept, border, tell)
        except BaseException:
            while self._under_way and not self._fault:
                self._answer()
            raise

    def fault(self) -> str:
        return self._fault

    def close(self) -> None:
        self._closing = True
        self._is_lost.set()
        self._onward.close()
        for child in self._children:
            child.close()

    def _pass_on(self, piece: Piece, token_ids: torch.Tensor, keep: list[int], ends_step: bool) -> int:
        """Compute this stage's layers of a piece and hand it on. Returns the first layer that other stages compute."""
        x = self._own.embed(token_ids[piece.rows])
        entered = self._own.enter(piece.batch, x)
        rows = Rows(self._step, 0, piece.spans, tuple(keep), ends_step)
        try:
            border = self._onward.carry(rows, x, lambda layers: entered.through(layers, None))
        except ChannelClosed as e:
            raise EngineLost(f"cannot hand on to the next stage: {e}") from e
        self._under_way += 1
        return border

    def _collect(self, kept: list[list[int]], border: int, after_layer: AfterLayer) -> torch.Tensor:
        """Wait for all pieces. Returns the logits of all kept rows, in order. Meanwhile calls after_layer for the layers
        from `border` on, in order, as soon as each is written."""
        rows: list[torch.Tensor] = []
        written: set[int] = set()
        done, layer = 0, border
        while done < len(kept) or layer < self._layers:
            answer, payload = self._answer()
            if isinstance(answer, LayerWritten):
                if answer.step == self._step:  # else it is late, from a step that failed
                    written.add(answer.layer)
                while layer in written:  # stages report independently, so not in order
                    after_layer(layer)
                    layer += 1
            elif isinstance(answer, PieceDone):
                if kept[done]:
                    rows.append(torch.frombuffer(payload, dtype=torch.float32).view(len(kept[done]), -1))
                done += 1
        return torch.cat(rows) if rows else torch.empty(0, self._own.vocab)

    def _answer(self) -> tuple[Answer, bytearray]:
        answer = self._answers.get()
        if answer is None:
            raise EngineLost(self._fault)
        if isinstance(answer[0], PieceDone):
            self._under_way -= 1
        return answer

    def _lose(self, child: Child) -> None:
        """Called in the thread that reads the child's answers."""
        ending = child.ending()
        if (
            child.followed
        ):  # wait for the report of the child that ended first: the fault should name that one
            self._is_lost.wait(END_S)
        with self._losing:
            if self._closing or self._fault:
                return
            self._fault = f"stage {child.stage} has gone ({ending})"
        log.error("stage_lost", stage=child.stage, pid=child.pid)
        self._is_lost.set()
        self._answers.put(None)


def start_group(
    config: EngineConfig,
    folder: Path,
    model: Any,
    shape: AttentionShape,
    arena: Arena,
    layers: Sequence[torch.Tensor],
    kernels: Kernels,
) -> GroupPath:
    """Start the other stages, and make this process stage 0. Blocks until all are ready. Takes over the model's weights:
    the model is unusable afterwards.

    The calling thread must live as long as the group is needed. Raises EngineLost if a stage does not start.
    """
    parts = layer_slices(len(layers), config.stages)
    threads = torch.get_num_threads()
    setups = [
        Setup(
            str(folder), arena.layout.dtype, kernels.build, shape, arena.layout, arena.pages, part, threads
        )
        for part in parts[1:]
    ]  # fmt: skip
    children, link = start(setups, arena.fd)
    try:
        own = LeanPath(model, shape, layers, kernels, parts[0].layers)
        for child in children:
            child.wait_ready()
    except BaseException:
        link.close()
        for child in children:
            child.close()
        raise
    onward = Onward(link, Seam(parts[0].earliest_end, parts[0].end), lambda: None)
    return GroupPath(own, len(layers), children, onward, config.piece_tokens, arena.layout.block_tokens)


def _kept(piece: Piece, keep: list[int]) -> list[int]:
    """Those rows of `keep` that are in the piece, as indices within the piece."""
    return [row - piece.rows.start for row in keep if piece.rows.start <= row < piece.rows.stop]


def _nothing(layer: int) -> None:
    pass
