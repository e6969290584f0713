"""The nodes that may be given work, by model and role, each with the book of what it has to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from shared.core.conductor.load_estimate import NodeBook
from shared.core.conductor.membership import Member
from shared.core.conductor.served_models import chosen_specs, kv_kind
from shared.protocol.cluster import CostCoefficients, NodeInfo, NodeLoad
from shared.protocol.ids import Incarnation, NodeId, NodeRef
from shared.protocol.model import ModelSpec

INFINITY = float("inf")
_turn = attrgetter("turn")


class Peer:
    """A ready life of a node."""

    __slots__ = (
        "_prior", "book", "cost", "host", "info", "load", "most_blocks", "most_requests", "most_waiting", "nearby",
        "node", "ref", "suspect", "turn",
    )  # fmt: skip

    def __init__(self, book: NodeBook) -> None:
        self.book = book
        self.load: NodeLoad | None = None
        self.suspect = False
        """A request failed on it; until it is heard again, others are preferred."""
        self.turn = 0
        """Grows with each assignment: of equals, the one whose last is longest ago comes first."""
        self.nearby: tuple[NodeId, ...] = ()
        """Itself and the cache nodes of its host: whose blocks are local to it."""

    def announced(self, info: NodeInfo, prior: CostCoefficients) -> None:
        """What it says of itself may have changed. `prior`: the time model of one that announces none."""
        self.info = info
        self.ref: NodeRef = info.ref
        self.node = self.ref.node
        self.host = self.ref.host or f"={self.ref.node}"
        """The machine it is on; one that does not say so is on a machine of its own."""
        self.most_blocks = info.kv_blocks or INFINITY
        self.most_waiting = info.max_waiting or INFINITY
        self.most_requests = info.max_running + info.max_waiting if info.max_running else INFINITY
        self._prior = info.cost or prior
        self.cost: CostCoefficients = (self.load.cost if self.load else None) or self._prior
        """The newest time model known."""

    def heard(self, load: NodeLoad) -> None:
        """Its newest load."""
        self.load = load
        self.cost = load.cost or self._prior
        self.suspect = False

    @property
    def samples(self) -> int:
        """Measurements behind its time model."""
        return self.load.cost_samples if self.load else 0

    @property
    def cost_given(self) -> bool:
        """Its time model is exact, however little was measured."""
        return self.load is not None and self.load.cost_given


@dataclass(slots=True, eq=False)
class Team:
    """The nodes that serve one model together: their KVCache is interchangeable."""

    spec: ModelSpec
    block_tokens: int
    block_bytes: int
    prefills: list[Peer] = field(default_factory=list)
    decodes: list[Peer] = field(default_factory=list)
    by_node: dict[NodeId, Peer] = field(default_factory=dict)


class Roster:
    """Rebuilt from the membership whenever that changes; books of lives that go on are kept."""

    def __init__(self, stale_s: float, prior: CostCoefficients) -> None:
        self._stale_s = stale_s
        self._prior = prior
        self._peers: dict[tuple[NodeId, Incarnation], Peer] = {}
        self._foreign: set[tuple[NodeId, Incarnation]] = set()
        self.teams: dict[str, Team] = {}
        self.caches: list[Peer] = []
        self.caches_on: dict[str, list[Peer]] = {}

    def rebuild(self, members: Iterable[Member]) -> list[NodeRef]:
        """Returns the lives that turn out foreign: their model's KVCache does not fit its team's. The team's is that of
        the chosen spec of its name (core.conductor.served_models). Each is returned once, as long as it stays so."""
        members = list(members)
        specs = chosen_specs(members)
        peers: dict[tuple[NodeId, Incarnation], Peer] = {}
        foreign: dict[tuple[NodeId, Incarnation], NodeRef] = {}
        self.teams, self.caches, self.caches_on = {}, [], {}
        for member in members:
            life = (member.ref.node, member.ref.incarnation)
            if not member.ready or member.info.role not in ("prefill", "decode", "cache"):
                continue
            peer = self._peers.get(life) or Peer(NodeBook(self._stale_s))
            peer.announced(member.info, self._prior)
            if self._enrol(peer, specs):
                peers[life] = peer
            else:
                foreign[life] = member.ref
        fresh = [ref for life, ref in foreign.items() if life not in self._foreign]
        self._peers, self._foreign = peers, set(foreign)
        for peer in peers.values():
            caches = [c.node for c in self.caches_on.get(peer.host, ()) if c is not peer]
            peer.nearby = (peer.node, *caches)
        return fresh

    def peer(self, node: NodeId, incarnation: Incarnation) -> Peer | None:
        return self._peers.get((node, incarnation))

    def reported(self, load: NodeLoad, now: float) -> None:
        """A member's newest load."""
        peer = self._peers.get((load.node, load.incarnation))
        if peer is not None:
            peer.heard(load)
            peer.book.reported(load, now)

    def check(self) -> None:
        for peer in self._peers.values():
            peer.book.check()
        enrolled = [p for team in self.teams.values() for p in (*team.prefills, *team.decodes)] + self.caches
        assert len(enrolled) == len(self._peers), "a peer is in no list, or in two"
        assert sum(len(on) for on in self.caches_on.values()) == len(self.caches), "caches by host disagree"

    def _enrol(self, peer: Peer, specs: dict[str, ModelSpec]) -> bool:
        info = peer.info
        if info.role == "cache":
            self.caches.append(peer)
            self.caches_on.setdefault(peer.host, []).append(peer)
            return True
        if info.model is None:
            return False
        spec = specs[info.model.name]
        if kv_kind(info.model) != kv_kind(spec):
            return False
        team = self.teams.setdefault(spec.name, Team(spec, spec.layout.block_tokens, spec.layout.block_bytes))
        (team.prefills if info.role == "prefill" else team.decodes).append(peer)
        team.by_node[peer.node] = peer
        return True


def usable(peers: Sequence[Peer], avoid: Sequence[tuple[NodeId, Incarnation]]) -> list[Peer]:
    """Those that have not just failed, as long as there are any. Whose last assignment is longest ago comes first."""
    untried = [p for p in peers if (p.node, p.ref.incarnation) not in avoid] if avoid else peers
    trusted = [p for p in untried if not p.suspect]
    return sorted(trusted or untried or peers, key=_turn)
