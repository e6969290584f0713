"""Captured decode steps: each size is captured once over fixed memory and launched as a whole. All other steps take the
general path.

A captured step reads token ids, positions, page tables and so on from the addresses they had when it was captured. So
before each launch they are written to these addresses, including the attention's plan. Missing rows are padded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from msgspec import Struct
from torch.nn.functional import pad

from shared.engine.attention.api import AttentionBackend, AttentionBatch, FixableBackend
from shared.engine.attention.uploads import pinned, upload
from shared.engine.graphs.capture import Capture
from shared.engine.graphs.sizes import fitting, padded
from shared.engine.paths.api import AfterLayer
from shared.engine.paths.general import Attending, GeneralPath
from shared.engine.weights import transformers as hf

log = structlog.get_logger(__name__)


class GraphedPath:
    """Implements paths.api.Forward for any decoder-only model whose layers launch the same work for any tokens."""

    def __init__(self, model: Any, backend: AttentionBackend, scrap: int, layers: int) -> None:
        """Nothing is captured until `capture` is called. `scrap` is a page that belongs to no sequence."""
        assert isinstance(backend, FixableBackend)
        self._model = model
        self._backend = backend
        self._eager = GeneralPath(model, backend)
        self._scrap = scrap
        self._layer_count = layers
        self._steps: dict[int, _FixedStep] = {}

    def capture(
        self,
        sizes: Sequence[int],
        pages_per_sequence: int,
        capture: Capture,
        progress: Callable[[float], None],
    ) -> None:
        """Capture steps of these sizes, the largest first. A size for which there is not enough memory is left out. Any
        other failure would repeat with the next size, so it ends the captures. One warning is logged for all of them.
        Steps without a capture take the general path."""
        inputs = _Inputs(max(sizes), self._model)
        lacking = ""
        gc.collect()  # now, so that it does not run during a capture
        for done, rows in enumerate(sorted(sizes, reverse=True)):
            progress(done / len(sizes))
            step = self._captured(rows, pages_per_sequence, capture, inputs)
            if isinstance(step, _FixedStep):
                self._steps[rows] = step
                continue
            lacking = lacking or f"{rows} rows: {step.reason}"
            if not step.too_large:
                break
            gc.collect()  # frees the failed attempt's memory for the next one
        self._steps = dict(sorted(self._steps.items()))
        if lacking:
            log.warning("decode_steps_not_captured", reason=lacking, captured=list(self._steps))

    def _captured(
        self, rows: int, pages_per_sequence: int, capture: Capture, inputs: _Inputs
    ) -> _FixedStep | _Failure:
        try:
            step = _FixedStep(self._model, self._backend.fixed(rows, pages_per_sequence), inputs, rows)
            step.set(padded(AttentionBatch(()), rows, self._scrap), torch.empty(0, dtype=torch.long))
            step.capture(capture)
        except Exception as e:  # any error: without a capture a step is slower, not wrong
            return _failure(e)
        return step

    @property
    def captured(self) -> tuple[int, ...]:
        """The captured sizes in rows, ascending."""
        return tuple(self._steps)

    def logits(
        self,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        keep: torch.Tensor,
        after_layer: AfterLayer | None,
    ) -> torch.Tensor:
        rows = fitting(batch, self.captured)
        if rows is None:
            return self._eager.logits(batch, token_ids, keep, after_layer)
        step = self._steps[rows]
        step.set(padded(batch, rows, self._scrap), token_ids)
        kept = upload(keep, self._model.device)
        step.launch()
        if after_layer is not None:
            for layer in range(self._layer_count):
                after_layer(layer)
        return step.logits[kept]

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        self._steps.clear()


class _Failure(Struct, frozen=True):
    """Why a capture failed. Does not keep the exception: its frames would keep the attempt's memory alive."""

    reason: str
    too_large: bool
    """There was not enough memory; a smaller size may succeed."""


def _failure(error: BaseException) -> _Failure:
    causes = _causes(error)
    told = [f"{type(cause).__name__}: {cause}" for cause in causes]
    lacks = ("out of memory", "buffer overflow")  # the wording of the driver and of FlashInfer's workspace
    memory = any(isinstance(cause, torch.OutOfMemoryError) for cause in causes)
    return _Failure(
        ", after ".join(told), memory or any(lack in what.lower() for what in told for lack in lacks)
    )


def _causes(error: BaseException) -> list[BaseException]:
    """An error and the errors in its context, outermost first. The one raised at the end of a failed capture says only
    that the capture was invalidated, not why."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None:
        found.append(at)
        at = at.__context__
    return found


class _Inputs:
    """Inputs and logits in fixed memory. All sizes share it, since only one step runs at a time."""

    def __init__(self, rows: int, model: Any) -> None:
        self.token_ids = torch.zeros(rows, dtype=torch.long, device=model.device)
        self.positions = torch.zeros(rows, dtype=torch.long, device=model.device)
        self.all_rows = torch.arange(rows, device=model.device)
        self.logits: torch.Tensor | None = None
        """[rows, vocab]; allocated when the first step is captured."""


class _FixedStep:
    """A decode step of exactly `rows` rows, in fixed memory."""

    def __init__(self, model: Any, backend: AttentionBackend, inputs: _Inputs, rows: int) -> None:
        self._model = model
        self._backend = backend
        self._inputs = inputs
        self._rows = rows
        self._launch: Callable[[], None] = self._run

    @property
    def logits(self) -> torch.Tensor:
        """Logits of each row; valid until the next step is launched."""
        assert self._inputs.logits is not None
        return self._inputs.logits[: self._rows]

    def set(self, batch: AttentionBatch, token_ids: torch.Tensor) -> None:
        """Set what the next launch computes. The rows after the last token id are padding."""
        device, inputs = self._model.device, self._inputs
        ids = pad(token_ids, (0, self._rows - len(token_ids)))
        positions = pinned(list(batch.positions()), torch.long, device)
        inputs.token_ids[: self._rows].copy_(upload(ids, device))
        inputs.positions[: self._rows].copy_(upload(positions, device))
        self._backend.plan(batch)

    def capture(self, capture: Capture) -> None:
        with torch.inference_mode():
            if self._inputs.logits is None:
                self._inputs.logits = torch.empty_like(self._forward())
            self._launch = capture(self._run)

    def launch(self) -> None:
        self._launch()

    def _run(self) -> None:
        self.logits.copy_(self._forward())

    def _forward(self) -> torch.Tensor:
        rows, inputs = slice(0, self._rows), self._inputs
        return hf.forward(
            self._model,
            inputs.token_ids[rows],
            inputs.positions[rows],
            inputs.all_rows[rows],
            Attending(self._backend),
        )
