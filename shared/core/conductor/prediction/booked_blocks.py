"""Blocks that prefill nodes are about to compute, so that prompts which share them can wait there instead of computing
them again.

A booking begins when a prompt is assigned to a node and ends when the node no longer has the attempt. By then the
blocks are in the index, or the attempt failed. A node takes its prompts in order, so a later prompt finds the booked
blocks computed when its turn comes. Other nodes can pull them from the cache node that gets them, once the prefill has
ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.protocol.ids import AttemptId, BlockKey, NodeId

MOST_PER_NODE = 64
"""Only so many of a node's latest bookings are looked through for one prompt."""
LINGER_S = 0.5
"""A booking stays so long after its attempt was last reported, until the index has heard of its blocks."""


@dataclass(slots=True, eq=False)
class _Booking:
    node: NodeId
    keys: Sequence[BlockKey]
    booked_s: float
    ready_s: float
    first: BlockKey | None
    """The first key that nobody held when it was booked."""
    reported: bool = False
    gone_s: float = float("inf")
    """When the node's reports first lacked the attempt."""


@dataclass(slots=True, frozen=True)
class Coming:
    """Blocks that a cache node will have soon."""

    node: NodeId
    """Who computes them."""
    blocks: int
    """Length of the prompt's leading run, with what is held already."""
    in_s: float
    """Predicted seconds until they can be pulled."""


class BookedBlocks:
    """The bookings of all prefill nodes. Like the index it is a hint: a wrong booking costs a recomputation."""

    def __init__(self, pending_s: float) -> None:
        """`pending_s`: how long an attempt may stay out of its node's reports before it counts as lost."""
        self._pending_s = pending_s
        self._nodes: dict[NodeId, dict[AttemptId, _Booking]] = {}
        self._busy_until_s: dict[NodeId, float] = {}
        """When each node was last predicted to be done with all it has."""
        self._coming: dict[BlockKey, _Booking] = {}
        """By the first key that nobody held: the booking whose blocks will be there first."""

    def book(
        self,
        node: NodeId,
        attempt: AttemptId,
        keys: Sequence[BlockKey],
        now: float,
        *,
        held_anywhere: int = 0,
        ready_s: float = float("inf"),
        busy_until_s: float = 0.0,
    ) -> None:
        """The node will compute, or load, all of these, and a cache node will have them at `ready_s`. `held_anywhere`:
        leading blocks that somebody holds now. `busy_until_s`: when the node is predicted to be done with all it has now,
        this included. A repeat replaces the earlier booking."""
        self.released(node, attempt)
        first = keys[held_anywhere] if held_anywhere < len(keys) else None
        booking = _Booking(node, keys, now, ready_s, first)
        self._nodes.setdefault(node, {})[attempt] = booking
        self._busy_until_s[node] = busy_until_s
        if first is not None:
            other = self._coming.get(first)
            if other is None or other.ready_s < now or ready_s < other.ready_s:
                self._coming[first] = booking

    def nodes(self) -> Sequence[NodeId]:
        return tuple(self._nodes)

    def run(self, node: NodeId, keys: Sequence[BlockKey], held: int) -> int:
        """Length of the leading run of `keys` that the node holds once its bookings are computed. It holds `held` blocks
        now. Keys are chained: two prompts with the same key at a position have the same blocks before it."""
        bookings = self._nodes.get(node)
        if not bookings or held >= len(keys):
            return held
        run, next_key = held, keys[held]
        for looked_at, booking in enumerate(reversed(bookings.values())):
            booked = booking.keys
            if len(booked) > run and booked[run] == next_key:
                run = _common(booked, keys, run)
                if run == len(keys):
                    break
                next_key = keys[run]
            if looked_at == MOST_PER_NODE:
                break
        return run

    def coming(self, keys: Sequence[BlockKey], held_anywhere: int, now: float) -> Coming | None:
        """What a running or waiting prefill adds to the blocks of a prompt that somebody holds."""
        booking = self._coming.get(keys[held_anywhere]) if held_anywhere < len(keys) else None
        if booking is None or booking.ready_s == float("inf"):
            return None
        blocks = _common(booking.keys, keys, held_anywhere)
        return Coming(booking.node, blocks, max(0.0, booking.ready_s - now))

    def reported(
        self, node: NodeId, attempts: Sequence[AttemptId], now: float, busy_until_s: float = 0.0
    ) -> None:
        """A node reported the attempts it has, and is predicted to be done with them at `busy_until_s`. If that is later
        or sooner than predicted before, so is all that is booked there."""
        bookings = self._nodes.get(node)
        if not bookings:
            return
        drift_s = busy_until_s - self._busy_until_s.get(node, busy_until_s)
        self._busy_until_s[node] = busy_until_s
        if drift_s:
            for booking in bookings.values():
                booking.ready_s += drift_s
        present = set(attempts)
        for attempt in list(bookings):
            booking = bookings[attempt]
            if attempt in present:
                booking.reported = True
                booking.gone_s = float("inf")
            elif booking.gone_s == float("inf"):
                if booking.reported or now - booking.booked_s > self._pending_s:
                    booking.gone_s = now
            elif now - booking.gone_s > LINGER_S:
                self._end(bookings.pop(attempt))
        if not bookings:
            del self._nodes[node], self._busy_until_s[node]

    def released(self, node: NodeId, attempt: AttemptId) -> None:
        """The attempt will not be computed there after all."""
        bookings = self._nodes.get(node)
        if not bookings or attempt not in bookings:
            return
        self._end(bookings.pop(attempt))
        if not bookings:
            del self._nodes[node], self._busy_until_s[node]

    def keep(self, nodes: Sequence[NodeId]) -> None:
        """Forget all other nodes."""
        for gone in self._nodes.keys() - set(nodes):
            del self._busy_until_s[gone]
            for booking in self._nodes.pop(gone).values():
                self._end(booking)

    def _end(self, booking: _Booking) -> None:
        first = booking.first
        if first is not None and self._coming.get(first) is booking:
            del self._coming[first]


def _common(booked: Sequence[BlockKey], keys: Sequence[BlockKey], low: int) -> int:
    """How long the common leading run is. It is longer than `low`. Chained keys are equal up to one point only."""
    high = min(len(booked), len(keys))
    low += 1
    if booked[high - 1] == keys[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if booked[middle] == keys[middle]:
            low = middle + 1
        else:
            high = middle
    return low
