"""Keeps the block index in step with every node's stream of block events.

Events of one life are numbered 1, 2, 3 ... without gaps. A gap means that some were lost, and a
snapshot is asked for. Until the snapshot is complete, events are applied as they arrive, and also kept so that they can
be applied again on top of it. A snapshot takes effect as a whole or not at all. Messages of other lives are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.core.conductor.block_index import BlockIndex
from shared.protocol.cluster import BlockEvents, BlockSnapshotPart
from shared.protocol.ids import BlockKey, Incarnation, NodeId

ASK_AGAIN_S = 2.0
"""Seconds after which a missing snapshot is asked for again."""
BEHIND_S = 1.0
"""Seconds a heartbeat's event count may be ahead of the events received. The two travel on different subjects."""
KEPT_EVENTS = 1024
"""Most events kept per node while a snapshot is awaited. Further ones leave a gap, which leads to another snapshot."""


@dataclass(slots=True, eq=False)
class _Assembly:
    """The parts of a snapshot received so far."""

    seq: int
    parts: int
    keys: dict[int, tuple[BlockKey, ...]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Stream:
    incarnation: Incarnation
    seq: int = 0
    """The index contains all events up to this one."""
    synced: bool = True
    asked_s: float = float("-inf")
    kept: dict[int, BlockEvents] = field(default_factory=dict)
    assembly: _Assembly | None = None
    announced_seq: int = 0
    behind_since_s: float = float("inf")


class BlockSync:
    """Applies events and snapshots to an index. `asks(now)` names the nodes whose snapshot is wanted."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self._streams: dict[NodeId, _Stream] = {}
        self.behind: dict[NodeId, None] = {}
        """Nodes whose snapshot is wanted (a dict, to keep their order)."""
        self.gaps = 0
        """How often a node that was in step turned out to have missing events."""

    def opened(self, node: NodeId, incarnation: Incarnation) -> None:
        """A life began, or was found running. What it holds is unknown until a snapshot, its event 1, or a heartbeat that
        counts no events."""
        stream = self._streams.get(node)
        if stream is not None and stream.incarnation == incarnation:
            return
        self.closed(node)
        self._streams[node] = _Stream(incarnation=incarnation, synced=False)
        self.behind[node] = None
        self.index.add(node)

    def closed(self, node: NodeId) -> None:
        self._streams.pop(node, None)
        self.behind.pop(node, None)
        self.index.drop(node)

    def synced(self, node: NodeId) -> bool:
        stream = self._streams.get(node)
        return stream is not None and stream.synced

    def changed(self, events: BlockEvents) -> None:
        """Events arrived. Ignored if already applied, or if from a life that is not open."""
        stream = self._stream(events.node, events.incarnation)
        if stream is None or events.seq <= stream.seq:
            return
        fresh = stream.seq == 0 and events.seq == 1 and not stream.kept
        if fresh or (stream.synced and events.seq == stream.seq + 1):
            self._catch_up(events.node, stream)
            stream.seq = events.seq
        else:
            self._lose(events.node, stream)
            if len(stream.kept) < KEPT_EVENTS:
                stream.kept[events.seq] = events
        self._apply(events)

    def snapshot_arrived(self, part: BlockSnapshotPart) -> None:
        """A part of a snapshot arrived. The last missing part completes it. Ignored if older than the events applied."""
        stream = self._stream(part.node, part.incarnation)
        if stream is None or part.seq < stream.seq or (stream.synced and part.seq == stream.seq):
            return
        if stream.assembly is None or stream.assembly.seq < part.seq:
            stream.assembly = _Assembly(seq=part.seq, parts=part.parts)
        if stream.assembly.seq == part.seq:
            stream.assembly.keys[part.part] = part.keys
            if len(stream.assembly.keys) == stream.assembly.parts:
                self._swap(part.node, stream, stream.assembly)

    def heartbeat(self, node: NodeId, incarnation: Incarnation, block_events_seq: int, now: float) -> None:
        """Notices missing events also when no later event follows to reveal the gap."""
        stream = self._streams.get(node)
        if stream is None or stream.incarnation != incarnation:
            return
        if block_events_seq <= stream.seq:
            stream.behind_since_s = float("inf")
            if stream.seq == 0 and not stream.synced:
                self._catch_up(node, stream)
        elif stream.synced:
            if stream.announced_seq <= stream.seq:
                stream.behind_since_s = now
            if now - stream.behind_since_s >= BEHIND_S:
                self._lose(node, stream)
        if block_events_seq > stream.announced_seq:
            stream.announced_seq = block_events_seq

    def asks(self, now: float) -> list[NodeId]:
        """Nodes to ask for a snapshot now. A node is named every ASK_AGAIN_S until its snapshot is complete."""
        nodes = []
        for node in self.behind:
            stream = self._streams[node]
            if now - stream.asked_s >= ASK_AGAIN_S:
                stream.asked_s = now
                nodes.append(node)
        return nodes

    def check(self) -> None:
        self.index.check()
        assert self.behind.keys() == {n for n, s in self._streams.items() if not s.synced}, (
            "`behind` is wrong"
        )
        for node, stream in self._streams.items():
            assert all(seq > stream.seq for seq in stream.kept), f"{node}: applied events are kept"
            assert not (stream.synced and stream.kept), f"{node}: in step, but events are kept"
            assert len(stream.kept) <= KEPT_EVENTS, f"{node}: too many events kept"

    # -- inside ------------------------------------------------------------------------------------------------

    def _stream(self, node: NodeId, incarnation: Incarnation) -> _Stream | None:
        stream = self._streams.get(node)
        return stream if stream is not None and stream.incarnation == incarnation else None

    def _apply(self, events: BlockEvents) -> None:
        if events.removed:
            self.index.remove(events.node, events.removed)
        if events.stored:
            self.index.store(events.node, events.stored)

    def _lose(self, node: NodeId, stream: _Stream) -> None:
        if stream.synced:
            self.gaps += 1
        stream.synced = False
        self.behind[node] = None

    def _catch_up(self, node: NodeId, stream: _Stream) -> None:
        stream.synced = True
        self.behind.pop(node, None)

    def _swap(self, node: NodeId, stream: _Stream, whole: _Assembly) -> None:
        self.index.replace(node, (key for part in whole.keys.values() for key in part))
        stream.assembly = None
        stream.seq = whole.seq
        waiting, stream.kept = stream.kept, {}
        self._catch_up(node, stream)
        for seq in sorted(waiting):
            self.changed(waiting[seq])
