"""FlashInfer's decode attention over fixed memory, for steps that are captured as CUDA graphs.

The kernels of a captured step read page tables and the wrapper's schedule at fixed addresses. Each plan writes them there
again, outside the graph. Only the number of sequences never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import flashinfer
import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape, Reach
from shared.engine.attention.flashinfer_tables import LAYOUT, PageTables, heads, uses_tensor_cores, variant

_KERNELS = "fa2"
"""Fixed, so that every plan of a captured step uses the kernels the step was captured with."""


class FixedDecode:
    """Implements attention.api.AttentionBackend for steps of exactly `rows` sequences of one token each, with at most
    `most_pages` pages in all. Schedules take 8 MiB on the device and 8 MiB on the host for each distinct reach."""

    def __init__(
        self,
        shape: AttentionShape,
        layers: Sequence[torch.Tensor],
        workspaces: Mapping[Reach, torch.Tensor],
        rows: int,
        most_pages: int,
    ) -> None:
        """The workspaces hold data of a single run only: work that does not run at the same time may share them."""
        self._shape = shape
        self._layers = layers
        self._device = layers[0].device

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        self._indptr, self._indices, self._last_page = ints(rows + 1), ints(most_pages), ints(rows)
        self._positions = ints(rows)
        self._rows = torch.arange(rows, dtype=torch.int32, device=self._device)
        self._wrappers = {
            reach: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspaces[reach],
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=uses_tensor_cores(shape),
                paged_kv_indptr_buffer=self._indptr,
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=self._last_page,
                backend=_KERNELS,
            )
            for reach in shape.distinct_reaches
        }

    def plan(self, batch: AttentionBatch) -> None:
        """All wrappers share the page tables, and each of them writes them."""
        tables = PageTables(batch, self._shape.block_tokens, self._device)
        for reach, wrapper in self._wrappers.items():
            kind = variant(self._shape, reach, self._layers[0].dtype)
            wrapper.plan(*tables.pages, *heads(self._shape), **kind)
        self._positions.copy_(tables.positions, non_blocking=True)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        flashinfer.append_paged_kv_cache(
            keys.contiguous(),
            values.contiguous(),
            self._rows,
            self._positions,
            self._layers[layer],
            self._indices,
            self._indptr,
            self._last_page,
            LAYOUT,
        )

    def run(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        wrapper = self._wrappers[self._shape.reach(layer)]
        output: torch.Tensor = wrapper.run(queries.contiguous(), self._layers[layer])
        return output
