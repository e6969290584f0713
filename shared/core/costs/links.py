"""The links between nodes, as the conductor predicts them."""

from __future__ import annotations

from msgspec import Struct

from shared.core.costs.model import transfer_s


class Links(Struct, frozen=True):
    """How fast KVCache moves between two nodes."""

    nic_bytes_s: float = 1.25e9
    shm_bytes_s: float = 4e9
    fixed_s: float = 0.002
    """Seconds per transfer whatever its size: request and connection."""
    shm_fixed_s: float | None = None
    """The same within a host. None: `fixed_s`."""

    def transfer_s(self, size_bytes: float, same_host: bool) -> float:
        if not same_host:
            return transfer_s(size_bytes, self.nic_bytes_s, self.fixed_s)
        fixed_s = self.fixed_s if self.shm_fixed_s is None else self.shm_fixed_s
        return transfer_s(size_bytes, self.shm_bytes_s, fixed_s)
