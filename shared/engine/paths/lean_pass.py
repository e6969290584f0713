"""One pass of a step's rows through layers of the lean path."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape
from shared.engine.native import kernels as native
from shared.engine.native.kernels import Kernels, Layer, Places
from shared.engine.native.plan import StepPlan
from shared.engine.paths.api import AfterLayer


class Space:
    """The kernels' buffers for a step of up to `rows` rows."""

    def __init__(self, rows: int, config: Any, shape: AttentionShape, panel: int) -> None:
        self.rows = rows
        inner = whole_panels(config.intermediate_size, panel)
        query = shape.query_heads * shape.head_dim
        widths = {
            "inputs": config.hidden_size,
            "attended": query,
            "activated": inner,
            "qkv": query + 2 * shape.kv_heads * shape.head_dim,
            "queries": query,
            "outputs": query,
            "gate_up": 2 * inner,
        }
        self._kept = {name: torch.zeros(rows * width) for name, width in widths.items()}
        self.buffers = native.Space(**{name: kept.data_ptr() for name, kept in self._kept.items()})


@dataclass(frozen=True, eq=False)
class Pass:
    """A step's rows on their way through layers. Methods call after_layer(i) once layer i's K and V are in the pages."""

    kernels: Kernels
    plan: StepPlan
    space: Space
    layers: ctypes.Array[Layer]
    first_layer: int
    """The number of layers[0] in the model."""
    kv_item_bytes: int
    batch: AttentionBatch
    x: torch.Tensor
    """The rows: float32 [rows, hidden], changed in place."""
    cosines: torch.Tensor
    sines: torch.Tensor
    """[rows, head_dim / 2]."""

    def through(self, layers: range, after_layer: AfterLayer | None) -> None:
        """Take the rows through consecutive layers."""
        told = _Told(after_layer, layers.start)
        self.kernels.lib.tsukimi_layers(
            self.plan.handle,
            torch.get_num_threads(),
            self._layer(layers.start),
            len(layers),
            ctypes.byref(self.space.buffers),
            len(self.x),
            self.x.data_ptr(),
            self._places(),
            self.kv_item_bytes,
            told.callback,
        )
        told.check()

    def write_kv(self, layer: int, after_layer: AfterLayer | None) -> None:
        """Compute only the layer's K and V of the rows, and write them into the pages. The rows do not change."""
        self.kernels.lib.tsukimi_write_kv(
            self.plan.handle,
            torch.get_num_threads(),
            self._layer(layer),
            ctypes.byref(self.space.buffers),
            len(self.x),
            self.x.data_ptr(),
            self._places(),
            self.kv_item_bytes,
        )
        if after_layer is not None:
            after_layer(layer)

    def _layer(self, layer: int) -> Any:
        index = layer - self.first_layer
        assert 0 <= index < len(self.layers)
        return ctypes.byref(self.layers, index * ctypes.sizeof(Layer))

    def _places(self) -> Any:
        return ctypes.byref(
            Places(self.cosines.data_ptr(), self.sines.data_ptr(), self.plan.slots.data_ptr())
        )


class _Told:
    """Wraps after_layer as a callback for the kernels."""

    def __init__(self, after_layer: AfterLayer | None, first: int) -> None:
        self._after_layer = after_layer
        self._first = first
        self._error: BaseException | None = None
        self.callback = native.AfterLayer() if after_layer is None else native.AfterLayer(self._tell)

    def _tell(self, layer: int) -> None:
        """An exception cannot pass through C++. It is kept until `check` raises it, and after_layer is not called for
        further layers."""
        try:
            if self._error is None and self._after_layer is not None:
                self._after_layer(self._first + layer)
        except BaseException as e:
            self._error = e

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def whole_panels(count: int, panel: int) -> int:
    """`count`, rounded up to a multiple of `panel`."""
    return -(-count // panel) * panel
