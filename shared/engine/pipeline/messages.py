"""What the processes of a group tell each other."""

from __future__ import annotations

from msgspec import Struct

from shared.engine.attention.api import AttentionShape, Span
from shared.engine.pipeline.slices import Slice
from shared.protocol.model import KVLayout

FOLLOWED = 3
"""Exit code of a stage that ends because another process of the group has."""


class Setup(Struct, frozen=True, tag=True):
    """Node to stage, once, on its control link."""

    folder: str
    dtype: str
    kernels: str
    """Name of the build."""
    shape: AttentionShape
    layout: KVLayout
    pages: int
    part: Slice
    threads: int


class Ready(Struct, frozen=True, tag=True):
    """Stage to node: it waits for pieces."""


class Rows(Struct, frozen=True, tag=True):
    """Stage to the next one. Payload: a piece's float32 rows [tokens, hidden] in front of `layer`."""

    step: int
    layer: int
    spans: tuple[Span, ...]
    keep: tuple[int, ...]
    """Rows whose logits are wanted."""
    ends_step: bool
    """The last piece of its step: the layers' K and V are complete behind it."""


class Reached(Struct, frozen=True, tag=True):
    """Stage to the one before it: see Seam.heard."""

    begun: int
    """Pieces, since the link was made."""
    written: int
    ending: bool


class LayerWritten(Struct, frozen=True, tag=True):
    """Stage to node: K and V of all the step's tokens are in the layer's pages."""

    step: int
    layer: int


class PieceDone(Struct, frozen=True, tag=True):
    """Last stage to node, for every piece in order. Payload: float32 logits [kept rows, vocab]."""


Answer = Ready | LayerWritten | PieceDone
