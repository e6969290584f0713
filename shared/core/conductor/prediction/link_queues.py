"""Which hosts are busy sending KVCache that the conductor itself asked for, so that a hot holder is not asked by all."""

from __future__ import annotations


class LinkQueues:
    """When each host's network card will have sent what was assigned."""

    def __init__(self) -> None:
        self._busy_until_s: dict[str, float] = {}

    def wait_s(self, host: str, now: float) -> float:
        """Seconds until the host has sent what was booked before."""
        return max(0.0, self._busy_until_s.get(host, 0.0) - now)

    def booked(self, host: str, now: float, seconds: float) -> None:
        """The host will send for so long."""
        self._busy_until_s[host] = max(now, self._busy_until_s.get(host, 0.0)) + seconds

    def keep(self, hosts: set[str]) -> None:
        """Forget all other hosts."""
        for gone in self._busy_until_s.keys() - hosts:
            del self._busy_until_s[gone]
