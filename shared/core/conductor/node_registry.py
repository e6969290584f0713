"""The nodes that may be given work, by model and role, each with its load estimate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from shared.core.conductor.load_estimate import LoadEstimate
from shared.core.conductor.membership import Member
from shared.core.conductor.served_models import chosen_specs, kv_kind
from shared.protocol.cluster import CostCoefficients, NodeInfo, NodeLoad
from shared.protocol.ids import Incarnation, NodeId, NodeRef
from shared.protocol.model import ModelSpec

INFINITY = float("inf")
_turn = attrgetter("turn")


class NodeState:
    """A ready life of a node."""

    __slots__ = (
        "_prior",
        "cost",
        "estimate",
        "host",
        "info",
        "load",
        "most_blocks",
        "most_requests",
        "most_waiting",
        "nearby",
        "node",
        "ref",
        "suspect",
        "turn",
    )  # fmt: skip

    def __init__(self, estimate: LoadEstimate) -> None:
        self.estimate = estimate
        self.load: NodeLoad | None = None
        self.suspect = False
        """A request failed on it. Other nodes are preferred until its next heartbeat."""
        self.turn = 0
        """Set to a growing number on each assignment. Among equals, the node assigned to least recently comes first."""
        self.nearby: tuple[NodeId, ...] = ()
        """The nodes whose blocks are local to it: itself and the cache nodes on its host."""

    def announced(self, info: NodeInfo, prior: CostCoefficients) -> None:
        """Take over an announcement. `prior` is the time model used if the node announces none."""
        self.info = info
        self.ref: NodeRef = info.ref
        self.node = self.ref.node
        self.host = self.ref.host or f"={self.ref.node}"
        """The machine it is on. A node that does not name one counts as alone on its own machine."""
        self.most_blocks = info.kv_blocks or INFINITY
        self.most_waiting = info.max_waiting or INFINITY
        self.most_requests = info.max_running + info.max_waiting if info.max_running else INFINITY
        self._prior = info.cost or prior
        self.cost: CostCoefficients = (self.load.cost if self.load else None) or self._prior
        """The newest time model known."""

    def heard(self, load: NodeLoad) -> None:
        """Take over its newest load. It is no longer suspect."""
        self.load = load
        self.cost = load.cost or self._prior
        self.suspect = False

    @property
    def samples(self) -> int:
        """Measurements behind its time model."""
        return self.load.cost_samples if self.load else 0

    @property
    def cost_given(self) -> bool:
        """Whether its time model is exact, however little was measured."""
        return self.load is not None and self.load.cost_given


@dataclass(slots=True, eq=False)
class ModelGroup:
    """The prefill and decode nodes that serve one model. Their KVCache is interchangeable."""

    spec: ModelSpec
    block_tokens: int
    block_bytes: int
    prefills: list[NodeState] = field(default_factory=list)
    decodes: list[NodeState] = field(default_factory=list)
    by_node: dict[NodeId, NodeState] = field(default_factory=dict)


class NodeRegistry:
    """Rebuilt whenever the membership changes. Lives that continue keep their load estimates."""

    def __init__(self, stale_s: float, prior: CostCoefficients) -> None:
        self._stale_s = stale_s
        self._prior = prior
        self._nodes: dict[tuple[NodeId, Incarnation], NodeState] = {}
        self._named: dict[NodeId, NodeState] = {}
        self._foreign: set[tuple[NodeId, Incarnation]] = set()
        self.groups: dict[str, ModelGroup] = {}
        self.caches: list[NodeState] = []
        self.caches_on: dict[str, list[NodeState]] = {}

    def rebuild(self, members: Iterable[Member]) -> list[NodeRef]:
        """Rebuild from all members. Returns the lives that are newly foreign: their KVCache is incompatible with the spec
        chosen for their model's name (core.conductor.served_models). A life that stays foreign is returned only once."""
        members = list(members)
        specs = chosen_specs(members)
        node_states: dict[tuple[NodeId, Incarnation], NodeState] = {}
        foreign: dict[tuple[NodeId, Incarnation], NodeRef] = {}
        self.groups, self.caches, self.caches_on = {}, [], {}
        for member in members:
            life = (member.ref.node, member.ref.incarnation)
            if not member.ready or member.info.role not in ("prefill", "decode", "cache"):
                continue
            node_state = self._nodes.get(life) or NodeState(LoadEstimate(self._stale_s))
            node_state.announced(member.info, self._prior)
            if self._enrol(node_state, specs):
                node_states[life] = node_state
            else:
                foreign[life] = member.ref
        fresh = [ref for life, ref in foreign.items() if life not in self._foreign]
        self._nodes, self._foreign = node_states, set(foreign)
        self._named = {node: node_state for (node, _), node_state in node_states.items()}
        for node_state in node_states.values():
            caches = [c.node for c in self.caches_on.get(node_state.host, ()) if c is not node_state]
            node_state.nearby = (node_state.node, *caches)
        return fresh

    def node_state(self, node: NodeId, incarnation: Incarnation) -> NodeState | None:
        return self._nodes.get((node, incarnation))

    def named(self, node: NodeId) -> NodeState | None:
        """The registered life of a node, whatever its model."""
        return self._named.get(node)

    def node_states(self) -> list[NodeState]:
        return list(self._nodes.values())

    def reported(self, load: NodeLoad, now: float) -> NodeState | None:
        """Take over a member's newest load. Returns its node, or None if the life is not registered."""
        node_state = self._nodes.get((load.node, load.incarnation))
        if node_state is not None:
            node_state.heard(load)
            node_state.estimate.reported(load, now)
        return node_state

    def check(self) -> None:
        for node_state in self._nodes.values():
            node_state.estimate.check()
        enrolled = [
            p for group in self.groups.values() for p in (*group.prefills, *group.decodes)
        ] + self.caches
        assert len(enrolled) == len(self._nodes), "a node is in no list, or in two"
        assert sum(len(on) for on in self.caches_on.values()) == len(self.caches), (
            "caches and caches_on disagree"
        )

    def _enrol(self, node_state: NodeState, specs: dict[str, ModelSpec]) -> bool:
        info = node_state.info
        if info.role == "cache":
            self.caches.append(node_state)
            self.caches_on.setdefault(node_state.host, []).append(node_state)
            return True
        if info.model is None:
            return False
        spec = specs[info.model.name]
        if kv_kind(info.model) != kv_kind(spec):
            return False
        group = self.groups.setdefault(
            spec.name, ModelGroup(spec, spec.layout.block_tokens, spec.layout.block_bytes)
        )
        (group.prefills if info.role == "prefill" else group.decodes).append(node_state)
        group.by_node[node_state.node] = node_state
        return True


def usable(node_states: Sequence[NodeState], avoid: Sequence[tuple[NodeId, Incarnation]]) -> list[NodeState]:
    """The nodes that are neither in `avoid` nor suspect; if there are none, those not in `avoid`; if none, all. The node
    assigned to least recently comes first."""
    untried = [p for p in node_states if (p.node, p.ref.incarnation) not in avoid] if avoid else node_states
    trusted = [p for p in untried if not p.suspect]
    return sorted(trusted or untried or node_states, key=_turn)
