"""The machines that nodes are on, each with a network card and a memory bus."""

from __future__ import annotations

from typing import Any

from tsukimi.simulate.network import Done, Network, SharedBandwidth
from tsukimi.simulate.timeline import Timeline


class Host:
    def __init__(self, nic_bytes_s: float, shm_bytes_s: float) -> None:
        self.sending = SharedBandwidth(nic_bytes_s)
        self.receiving = SharedBandwidth(nic_bytes_s)
        self.memory = SharedBandwidth(shm_bytes_s)


class Hosts:
    """Moves bytes between hosts over their cards, or within one over its memory bus."""

    def __init__(self, timeline: Timeline, nic_bytes_s: float, shm_bytes_s: float) -> None:
        self.timeline = timeline
        self._speeds = (nic_bytes_s, shm_bytes_s)
        self._hosts: dict[str, Host] = {}
        self._links: dict[tuple[str, str], tuple[SharedBandwidth, ...]] = {}
        self.network = Network(timeline.at)

    def start(self, source: str, target: str, size_bytes: float, done: Done, argument: Any = None) -> None:
        self.network.start(self.timeline.now, self.links(source, target), size_bytes, done, argument)

    def links(self, source: str, target: str) -> tuple[SharedBandwidth, ...]:
        """The links that bytes between two hosts flow over."""
        links = self._links.get((source, target))
        if links is None:
            links = self._links[source, target] = self._between(source, target)
        return links

    def moved_bytes(self) -> tuple[float, float]:
        """Bytes moved over network cards, and over memory buses."""
        hosts = self._hosts.values()
        return sum(h.sending.moved_bytes for h in hosts), sum(h.memory.moved_bytes for h in hosts)

    def _between(self, source: str, target: str) -> tuple[SharedBandwidth, ...]:
        if source == target:
            return (self._host(source).memory,)
        return self._host(source).sending, self._host(target).receiving

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(*self._speeds)
        return self._hosts[name]
