"""Copies between a device's pages and host memory of the same layout, through a ring of staging buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from shared.engine.staging.lanes import Lane, Mark
from shared.engine.staging.pieces import Piece, pieces
from shared.engine.staging.ring import Ring
from shared.engine.staging.written import Written

BUFFERS = 8
_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
"""Copies treat KV as raw bits, in the widest of these words that fits: many times faster than as 16-bit floats."""


class Units:
    """Indices of some units of the pages, on the host and on the device."""

    def __init__(self, what: Written, row_words: int, lane: Lane) -> None:
        self.words = what.rows * row_words
        self.host = torch.tensor(what.units)
        self.device = lane.indices(self.host)

    def __len__(self) -> int:
        return len(self.host)


class Stager:
    """Neither direction blocks, except to wait for the oldest copy when all buffers are in use. Use it only from the
    thread that computes."""

    def __init__(
        self, device: torch.Tensor, host: torch.Tensor, row_bytes: int, lane: Lane, buffer_bytes: int
    ) -> None:
        """`device` and `host` are `[layers, pages, ...]` with the same layers, contiguous, whose rows have `row_bytes`
        bytes each. The device may have more pages than the host."""
        word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
        self._row_words = row_bytes // word.itemsize
        self._buffer_words = buffer_bytes // word.itemsize
        self._device, self._host = device.flatten(1).view(word), host.flatten(1).view(word)
        self._lane = lane
        buffers = [lane.buffer(self._buffer_words * word.itemsize) for _ in range(BUFFERS)]
        self._ring = Ring([buffer.view(word) for buffer in buffers])

    def units(self, what: Written) -> Units:
        return Units(what, self._row_words, self._lane)

    def load(self, units: Units) -> None:
        """Begin to copy units of all layers to the device. Computation that is launched later waits for them."""
        mark: Mark | None = None
        for piece in self._cut(range(len(self._host)), units):
            mark = self._ring.stage(partial(self._begin_load, units, piece))
        if mark is not None:
            self._lane.precede_computing(mark)

    def store(self, layers: range, units: Units, then: Callable[[], None] | None) -> None:
        """Begin to copy units of these layers to the host, as they are after all computation launched so far. `then` is
        called once they are on the host: from within this or a later method call, in the order of the `store` calls."""
        parts = list(self._cut(layers, units))
        for piece in parts:
            last = then if piece is parts[-1] else None
            self._ring.stage(
                partial(self._begin_store, units, piece), partial(self._end_store, units, piece, last)
            )
        self._ring.end_finished()

    def settle(self) -> None:
        """Wait until all copies are done and every `then` has been called."""
        self._ring.settle()

    def forget(self) -> None:
        """Drop the copies that have not ended: they change nothing on the host, and their `then` is not called."""
        self._ring.forget()

    # -- one piece -------------------------------------------------------------------------------------------------

    def _cut(self, layers: range, units: Units) -> Iterator[Piece]:
        return pieces(layers, len(units), self._buffer_words // units.words)

    def _begin_load(self, units: Units, piece: Piece, buffer: torch.Tensor) -> Mark:
        staged = _staged(buffer, units, piece)
        torch.index_select(_part(self._host, units, piece), 1, units.host[piece.units], out=staged)
        target = _part(self._device, units, piece)

        def work() -> None:
            target.index_copy_(1, units.device[piece.units], staged.to(target.device, non_blocking=True))

        return self._lane.submit(work)

    def _begin_store(self, units: Units, piece: Piece, buffer: torch.Tensor) -> Mark:
        staged, source = _staged(buffer, units, piece), _part(self._device, units, piece)

        def work() -> None:
            staged.copy_(source.index_select(1, units.device[piece.units]), non_blocking=True)

        return self._lane.submit(work)

    def _end_store(
        self, units: Units, piece: Piece, then: Callable[[], None] | None, buffer: torch.Tensor
    ) -> None:
        target = _part(self._host, units, piece)
        target.index_copy_(1, units.host[piece.units], _staged(buffer, units, piece))
        if then is not None:
            then()


def _part(pages: torch.Tensor, units: Units, piece: Piece) -> torch.Tensor:
    """The piece's layers, divided into units: [layers of the piece, all units, words per unit]."""
    layers = pages[piece.first_layer : piece.last_layer]
    return layers.view(len(layers), -1, units.words)


def _staged(buffer: torch.Tensor, units: Units, piece: Piece) -> torch.Tensor:
    """Room for the piece at the beginning of a buffer: [layers, units, words per unit]."""
    layers, count = piece.size
    return buffer[: layers * count * units.words].view(layers, count, units.words)
