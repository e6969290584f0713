"""The nodes that may be given work, by model and role, each with the book of what it has to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from shared.core.membership import Member
from shared.core.node_book import NodeBook
from shared.protocol.cluster import CostCoefficients, NodeLoad
from shared.protocol.ids import Incarnation, NodeId, NodeRef
from shared.protocol.model import KVLayout, ModelSpec


class Peer(Struct):
    """A ready life of a node."""

    member: Member
    book: NodeBook
    suspect_s: float = float("-inf")
    """When a request last failed on it; until it is heard again, others are preferred."""
    turn: int = 0
    """Grows with each assignment: of equals, the one whose last is longest ago comes first."""

    @property
    def ref(self) -> NodeRef:
        return self.member.info.ref

    @property
    def host(self) -> str:
        return host_of(self.member.info.ref)

    @property
    def load(self) -> NodeLoad | None:
        return self.member.load

    @property
    def samples(self) -> int:
        return self.member.load.cost_samples if self.member.load else 0

    def cost(self, prior: CostCoefficients) -> CostCoefficients:
        """The newest time model known."""
        load = self.member.load
        return (load.cost if load else None) or self.member.info.cost or prior

    def fits(self, blocks: int) -> bool:
        return blocks <= self.member.info.kv_blocks or not self.member.info.kv_blocks


class Team(Struct):
    """The nodes that serve one model together: their KVCache is interchangeable."""

    spec: ModelSpec
    prefills: list[Peer] = field(default_factory=list)
    decodes: list[Peer] = field(default_factory=list)

    @property
    def layout(self) -> KVLayout:
        return self.spec.layout


class Roster:
    """Rebuilt from the membership whenever that changes; books of lives that go on are kept."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._peers: dict[tuple[NodeId, Incarnation], Peer] = {}
        self._foreign: set[tuple[NodeId, Incarnation]] = set()
        self.teams: dict[str, Team] = {}
        self.caches: list[Peer] = []
        self.caches_on: dict[str, list[Peer]] = {}

    def rebuild(self, members: Iterable[Member]) -> list[NodeRef]:
        """Returns the lives that turn out foreign: their model's KVCache does not fit its team's. The team's is that of
        the node that joined first. Each is returned once."""
        peers: dict[tuple[NodeId, Incarnation], Peer] = {}
        foreign: dict[tuple[NodeId, Incarnation], NodeRef] = {}
        self.teams, self.caches, self.caches_on = {}, [], {}
        for member in members:
            life = (member.ref.node, member.ref.incarnation)
            if not member.ready or member.info.role not in ("prefill", "decode", "cache"):
                continue
            peer = self._peers.get(life)
            if peer is None:
                peer = Peer(member=member, book=NodeBook(self._stale_s))
            peer.member = member
            if self._enrol(peer):
                peers[life] = peer
            else:
                foreign[life] = member.ref
        fresh = [ref for life, ref in foreign.items() if life not in self._foreign]
        self._peers, self._foreign = peers, set(foreign)
        return fresh

    def peer(self, node: NodeId, incarnation: Incarnation) -> Peer | None:
        return self._peers.get((node, incarnation))

    def reported(self, load: NodeLoad, now: float) -> None:
        peer = self._peers.get((load.node, load.incarnation))
        if peer is not None:
            peer.book.reported(load, now)
            peer.suspect_s = float("-inf")

    def check(self) -> None:
        for peer in self._peers.values():
            peer.book.check()
        enrolled = [p for team in self.teams.values() for p in (*team.prefills, *team.decodes)] + self.caches
        assert len(enrolled) == len(self._peers), "a peer is in no list, or in two"
        assert sum(len(on) for on in self.caches_on.values()) == len(self.caches), "caches by host disagree"

    def _enrol(self, peer: Peer) -> bool:
        info = peer.member.info
        if info.role == "cache":
            self.caches.append(peer)
            self.caches_on.setdefault(peer.host, []).append(peer)
            return True
        if info.model is None:
            return False
        team = self.teams.setdefault(info.model.name, Team(spec=info.model))
        if (info.model.namespace, info.model.layout) != (team.spec.namespace, team.spec.layout):
            return False
        (team.prefills if info.role == "prefill" else team.decodes).append(peer)
        return True


def host_of(ref: NodeRef) -> str:
    """The machine a node is on; one that does not say so is on a machine of its own."""
    return ref.host or f"={ref.node}"


def usable(peers: Sequence[Peer], avoid: Iterable[tuple[NodeId, Incarnation]]) -> Sequence[Peer]:
    """Those that have not just failed, as long as there are any. Whose last assignment is longest ago comes first."""
    failed = set(avoid)
    untried = [p for p in peers if (p.ref.node, p.ref.incarnation) not in failed]
    trusted = [p for p in untried if p.suspect_s == float("-inf")]
    return sorted(trusted or untried or peers, key=lambda p: p.turn)
