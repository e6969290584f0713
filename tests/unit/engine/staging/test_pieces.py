"""Copies cut into pieces: everything once, in the order of layers, nothing larger than a buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.staging.pieces import Piece, pieces


def test_layers_go_together_where_they_fit() -> None:
    assert list(pieces(range(5), 3, 7)) == [Piece(0, 2, 0, 3), Piece(2, 4, 0, 3), Piece(4, 5, 0, 3)]


def test_a_layer_that_does_not_fit_is_cut() -> None:
    assert list(pieces(range(2, 4), 5, 4)) == [
        Piece(2, 3, 0, 4), Piece(2, 3, 4, 5), Piece(3, 4, 0, 4), Piece(3, 4, 4, 5),
    ]  # fmt: skip


def test_nothing_to_copy() -> None:
    assert list(pieces(range(3), 0, 4)) == []


@given(st.integers(0, 5), st.integers(0, 6), st.integers(1, 20), st.integers(1, 12))
def test_every_unit_of_every_layer_once_and_in_order(first: int, layers: int, units: int, most: int) -> None:
    cut = list(pieces(range(first, first + layers), units, most))
    seen = [
        (layer, unit)
        for piece in cut
        for layer in range(piece.first_layer, piece.last_layer)
        for unit in range(piece.first, piece.last)
    ]
    assert seen == [(layer, unit) for layer in range(first, first + layers) for unit in range(units)]
    assert all(piece.size[0] * piece.size[1] <= most for piece in cut)
