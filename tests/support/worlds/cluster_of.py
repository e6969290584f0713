"""A cluster as a conductor sees it: announcements, heartbeats, block events and placement requests."""

from __future__ import annotations

from typing import Any

from shared.core.conductor.events import (
    BlocksChanged,
    ConductorConfig,
    LoadReported,
    NodeAnnounced,
    PlaceAsked,
    ReplyPlacement,
    ReplyRefusal,
)
from shared.core.conductor.machine import ConductorMachine
from shared.protocol.cluster import BlockEvents, CostCoefficients, NodeInfo, NodeLoad
from shared.protocol.errors import WireError
from shared.protocol.ids import NodeRef, Role
from shared.protocol.model import KVLayout, ModelSpec
from shared.protocol.requests import Placement, PlaceRequest

BLOCK_TOKENS = 16
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=BLOCK_TOKENS, dtype="toy", dtype_bytes=4)
SPEC = ModelSpec(
    name="toy",
    path="toy",
    vocab_size=256,
    context_tokens=65536,
    eos_token_ids=(0,),
    layout=LAYOUT,
    namespace=b"n" * 16,
)
COST = CostCoefficients(
    prefill_fixed_s=0.01, prefill_token_s=1e-3, step_fixed_s=0.02, step_request_s=1e-3, step_token_s=1e-6
)


def keys(*ids: int) -> tuple[bytes, ...]:
    return tuple(i.to_bytes(16, "big") for i in ids)


def ref(node: str, host: str = "", life: str = "1") -> NodeRef:
    return NodeRef(node=node, incarnation=life, host=host or f"host-of-{node}")


class ClusterOf:
    """Feeds a ConductorMachine; every call checks its laws. p-i and c-i are on host h<i>, d-i is on host g<i>."""

    def __init__(self, prefills: int, decodes: int, caches: int = 0, **config: Any) -> None:
        config.setdefault("inline_tokens", 0)
        self.machine = ConductorMachine(ConductorConfig(**config))
        self.now = 100.0
        self.commands: list[Any] = []
        self._asks = 0
        self._seqs: dict[str, int] = {}
        self._event_seqs: dict[str, int] = {}
        for role, letter, count in (
            ("prefill", "p", prefills),
            ("decode", "d", decodes),
            ("cache", "c", caches),
        ):
            for i in range(count):
                self.join(f"{letter}-{i}", role)  # type: ignore[arg-type]

    def feed(self, event: Any) -> list[Any]:
        commands = self.machine.handle(event, self.now)
        if len(self.machine.index) < 500:  # a check takes time linear in the number of blocks held
            self.machine.check()
        self.commands += commands
        return commands

    def join(self, node: str, role: Role, *, life: str = "1", **info: Any) -> list[Any]:
        host = ("g" if role == "decode" else "h") + node.split("-")[1]
        info.setdefault("stage", "ready")
        info.setdefault("kv_blocks", 4096)
        info.setdefault("cost", COST)
        if role != "cache":
            info.setdefault("model", SPEC)
        commands = self.feed(NodeAnnounced(NodeInfo(ref=ref(node, host, life), role=role, **info)))
        return commands + self.report(node, role, life=life)

    def report(self, node: str, role: Role, *, life: str = "1", **load: Any) -> list[Any]:
        self._seqs[node] = self._seqs.get(node, 0) + 1
        load.setdefault("stage", "ready")
        load.setdefault("kv_blocks", 4096)
        load.setdefault("block_events_seq", self._event_seqs.get(node, 0))
        return self.feed(
            LoadReported(NodeLoad(node=node, incarnation=life, role=role, seq=self._seqs[node], **load))
        )

    def stored(
        self, node: str, stored: tuple[bytes, ...], removed: tuple[bytes, ...] = (), life: str = "1"
    ) -> None:
        self._event_seqs[node] = self._event_seqs.get(node, 0) + 1
        events = BlockEvents(
            node=node, incarnation=life, seq=self._event_seqs[node], stored=stored, removed=removed
        )
        self.feed(BlocksChanged(events))

    def ask(
        self, prompt_tokens: int = 100, block_keys: tuple[bytes, ...] = (), **request: Any
    ) -> Placement | WireError:
        self._asks += 1
        request.setdefault("attempt", f"r{self._asks}/0/0")
        request.setdefault("max_new_tokens", 100)
        commands = self.feed(
            PlaceAsked(
                PlaceRequest(
                    model=request.pop("model", "toy"),
                    prompt_tokens=prompt_tokens,
                    block_keys=block_keys,
                    budget_s=60.0,
                    **request,
                ),
                ask=self._asks,
            )
        )
        reply = commands[-1]
        assert isinstance(reply, ReplyPlacement | ReplyRefusal)
        assert reply.ask == self._asks
        return reply.placement if isinstance(reply, ReplyPlacement) else reply.error

    def place(
        self, prompt_tokens: int = 100, block_keys: tuple[bytes, ...] = (), **request: Any
    ) -> Placement:
        answer = self.ask(prompt_tokens, block_keys, **request)
        assert isinstance(answer, Placement), answer
        return answer

    def refused(self, *args: Any, **request: Any) -> WireError:
        answer = self.ask(*args, **request)
        assert isinstance(answer, WireError), answer
        return answer


def names(placement: Placement) -> tuple[str | None, str | None]:
    return (
        placement.prefill.node if placement.prefill else None,
        placement.decode.node if placement.decode else None,
    )
