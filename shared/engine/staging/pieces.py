"""Cuts a copy of units of many layers into pieces that each fit into a buffer."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct


class Piece(Struct, frozen=True):
    """Units first .. last-1 of each of the layers first_layer .. last_layer-1."""

    first_layer: int
    last_layer: int
    first: int
    last: int

    @property
    def units(self) -> slice:
        return slice(self.first, self.last)

    @property
    def size(self) -> tuple[int, int]:
        """(number of layers, number of units per layer)."""
        return self.last_layer - self.first_layer, self.last - self.first


def pieces(layers: range, units: int, most: int) -> Iterator[Piece]:
    """Pieces that cover every unit of every layer once, in the order of layers. A piece has at most `most` units, counted
    over all its layers: several whole layers if they fit, else a part of one layer."""
    if units <= 0:
        return
    together = max(1, most // units)
    for first_layer in range(layers.start, layers.stop, together):
        last_layer = min(first_layer + together, layers.stop)
        for first in range(0, units, most):
            yield Piece(first_layer, last_layer, first, min(first + most, units))
