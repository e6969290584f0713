"""Network links that the flows on them share fairly.

A flow crosses a sender's and a receiver's link, or the memory bus of one host. Its rate is an equal share of the
tightest of them. Rates change only when a flow begins or ends; in between, all progress is linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Done = Callable[[Any], None]


class SharedBandwidth:
    """One side of a network card, or a memory bus."""

    __slots__ = ("bytes_s", "flows", "moved_bytes")

    def __init__(self, bytes_s: float) -> None:
        if bytes_s <= 0:
            raise ValueError("a link moves something")
        self.bytes_s = bytes_s
        self.flows: dict[Flow, None] = {}
        self.moved_bytes = 0.0


class Flow:
    """Bytes on their way. `done(argument)` is called when none are left."""

    __slots__ = ("_at", "argument", "done", "finish_at", "left_bytes", "links", "rate", "version")

    def __init__(
        self, now: float, links: tuple[SharedBandwidth, ...], size_bytes: float, done: Done, argument: Any
    ) -> None:
        self.links = links
        self.left_bytes = size_bytes
        self.done = done
        self.argument = argument
        self.rate = 0.0
        self.finish_at = float("inf")
        self.version = 0
        self._at = now

    def advance_to(self, now: float) -> None:
        left = self.left_bytes
        moved = left
        if now < self.finish_at:
            come = self.rate * (now - self._at)
            moved = come if come < left else left
        self._at = now
        if moved:
            self.left_bytes = left - moved
            for link in self.links:
                link.moved_bytes += moved


class Network:
    """All flows. It asks to be called back with `schedule(at, callback, argument)`."""

    def __init__(self, schedule: Callable[[float, Done, Any], None]) -> None:
        self._schedule = schedule
        self._flows: dict[Flow, None] = {}

    def start(
        self,
        now: float,
        links: tuple[SharedBandwidth, ...],
        size_bytes: float,
        done: Done,
        argument: Any = None,
    ) -> Flow:
        """A flow of no bytes is done at once, but never within this call."""
        flow = Flow(now, links, size_bytes, done, argument)
        self._flows[flow] = None
        rate = float("inf")
        alone = True
        for link in links:
            if link.flows:
                alone = False
            elif link.bytes_s < rate:
                rate = link.bytes_s
            link.flows[flow] = None
        if alone:  # the usual case
            self._speed(now, flow, rate)
        else:
            self._share_anew(now, links)
        return flow

    def cancel(self, now: float, flow: Flow) -> None:
        """The flow stops where it is, and `done` is never called. Idempotent."""
        if flow in self._flows:
            flow.advance_to(now)
            self._remove(now, flow)

    def earliest_finish(self) -> float:
        """When the next flow ends, if none begins before that. Infinity without flows."""
        return min((flow.finish_at for flow in self._flows), default=float("inf"))

    def check(self) -> None:
        for flow in self._flows:
            assert flow.left_bytes >= 0.0
            for link in flow.links:
                assert flow in link.flows, "a flow does not know its links"
                assert sum(f.rate for f in link.flows) <= link.bytes_s * (1 + 1e-9), (
                    "a link moves more than it can"
                )

    def _share_anew(self, now: float, links: tuple[SharedBandwidth, ...]) -> None:
        """Give each flow on these links its share anew."""
        for link in links:
            for flow in link.flows:
                rate = float("inf")
                for one in flow.links:
                    share = one.bytes_s / len(one.flows)
                    if share < rate:
                        rate = share
                if rate != flow.rate:
                    flow.advance_to(now)
                    self._speed(now, flow, rate)

    def _speed(self, now: float, flow: Flow, rate: float) -> None:
        flow.rate = rate
        flow.version += 1
        flow.finish_at = now + flow.left_bytes / rate
        self._schedule(flow.finish_at, self._finished, (flow, flow.version))

    def _finished(self, which: tuple[Flow, int]) -> None:
        flow, version = which
        if flow.version == version:
            flow.advance_to(flow.finish_at)
            self._remove(flow.finish_at, flow)
            flow.done(flow.argument)

    def _remove(self, now: float, flow: Flow) -> None:
        flow.version += 1
        del self._flows[flow]
        shared = False
        for link in flow.links:
            del link.flows[flow]
            if link.flows:
                shared = True
        if shared:
            self._share_anew(now, flow.links)
