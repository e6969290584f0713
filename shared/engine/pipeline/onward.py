"""The link to the next stage: computes a piece up to the layer at which the next stage takes over, and sends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from msgspec import structs

from shared.engine.pipeline.channel import ChannelClosed, StageChannel, raw, read_ahead
from shared.engine.pipeline.messages import Reached, Rows
from shared.engine.pipeline.seam import Seam, Turn


class Onward:
    """Call it from one thread. It starts a second thread, which receives the next stage's progress."""

    def __init__(self, link: StageChannel[Reached], seam: Seam, lost: Callable[[], None]) -> None:
        """`lost` is called in the second thread when the next stage has gone."""
        self._link = link
        self._seam = seam
        self._lost = lost
        self._gone = False
        self._step = 0
        self._heard = threading.Condition()
        read_ahead(link, self._take, self._end)

    def carry(self, rows: Rows, x: torch.Tensor, through: Callable[[range], None]) -> int:
        """Take x through the layers that this stage computes, then send it to the next stage.

        x holds the rows that are the input to rows.layer; `through(layers)` computes layers on them in place. Returns the
        first layer that the next stage computes. Blocks while the next stage is too far behind. Raises ChannelClosed."""
        if rows.step != self._step:
            self._step = rows.step
            with self._heard:
                self._seam.begin_step()
        layer = self._seam.earliest
        if rows.layer < layer:
            through(range(rows.layer, layer))
        while not self._is_due(layer):
            through(range(layer, layer + 1))
            layer += 1
        self._link.send(structs.replace(rows, layer=layer), raw(x))
        return layer

    def close(self) -> None:
        self._link.close()

    def _is_due(self, layer: int) -> bool:
        """Whether to hand the piece on before `layer`; if so, the seam counts it as handed on. Blocks until that is
        decided. Raises ChannelClosed."""
        with self._heard:
            while True:
                if self._gone:
                    raise ChannelClosed("it has gone")
                turn = self._seam.turn(layer)
                if turn is Turn.HAND_ON:
                    self._seam.handed_on(layer)
                if turn is not Turn.WAIT:
                    return turn is Turn.HAND_ON
                self._heard.wait()

    def _take(self, message: tuple[Reached, bytearray]) -> None:
        reached, _ = message
        with self._heard:
            self._seam.heard(reached.begun, reached.written, reached.ending)
            self._heard.notify()

    def _end(self) -> None:
        with self._heard:
            self._gone = True
            self._heard.notify()
        self._lost()
