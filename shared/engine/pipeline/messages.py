"""The messages between the processes of a group."""

from __future__ import annotations

from msgspec import Struct

from shared.engine.attention.api import AttentionShape, Span
from shared.engine.pipeline.slices import Slice
from shared.protocol.model import KVLayout

FOLLOWED = 3
"""Exit code of a stage that ends because another process of the group has ended."""


class Setup(Struct, frozen=True, tag=True):
    """Node to stage: sent once, first on the control link."""

    folder: str
    dtype: str
    kernels: str
    """Name of the kernels' build."""
    shape: AttentionShape
    layout: KVLayout
    pages: int
    part: Slice
    threads: int


class Ready(Struct, frozen=True, tag=True):
    """Stage to node: it has loaded and waits for pieces."""


class Rows(Struct, frozen=True, tag=True):
    """Stage to the next stage: a piece. Payload: its rows as input to `layer`, float32 [tokens, hidden]."""

    step: int
    layer: int
    spans: tuple[Span, ...]
    keep: tuple[int, ...]
    """Rows whose logits are wanted, as indices within the piece."""
    ends_step: bool
    """This is the last piece of its step: once it has passed a layer, the layer's K and V are complete."""


class Reached(Struct, frozen=True, tag=True):
    """Stage to the stage before it: its progress. The fields are the arguments of Seam.heard."""

    begun: int
    """Pieces begun since the link was made."""
    written: int
    """The stage has written K and V of its latest piece for all layers below this one."""
    ending: bool
    """The stage is about to be done with its latest piece."""


class LayerWritten(Struct, frozen=True, tag=True):
    """Stage to node: K and V of all the step's tokens are in the layer's pages."""

    step: int
    layer: int


class PieceDone(Struct, frozen=True, tag=True):
    """Last stage to node: one for every piece, in order. Payload: float32 logits [kept rows, vocab]."""


Answer = Ready | LayerWritten | PieceDone
