"""`tsukimi status`: every node, from its announcement and its last heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, get_args

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.io.nats_bus import connect
from shared.protocol.cluster import NodeInfo, NodeLoad, RollCall
from shared.protocol.ids import Role
from shared.protocol.subjects import ANNOUNCE, HEARTBEAT_ALL, ROLL_CALL
from tsukimi.errors import ToolError
from tsukimi.local.report import STYLES

CONNECT_S = 3.0
LISTEN_S = 1.5
"""Longest time to listen, in seconds: three heartbeats."""
SETTLE_S = 0.6
"""Shortest time to listen, in seconds: one heartbeat, which shows a node whose announcement was lost."""
ROLES: tuple[Role, ...] = get_args(Role)
COMPUTE = ("prefill", "decode")


class NodeStatus(Struct, frozen=True):
    node: str
    role: str
    stage: str
    detail: str
    incarnation: str
    host: str
    pid: int
    model: str
    kv_token_bytes: int
    """KV bytes of one token; 0 for nodes that serve no model."""
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_held: int
    kv_blocks_cached: int
    queue_s: float
    batch_tokens: int
    hit_rate: float | None
    """Share of a compute node's prompt tokens that it did not have to compute."""
    counters: dict[str, float]


class ClusterStatus(Struct, frozen=True):
    nats_url: str
    nodes: tuple[NodeStatus, ...]
    running: int
    waiting: int
    kv_blocks_held: int
    kv_blocks_cached: int
    hit_rate: float | None


class RollBook:
    """Collects announcements and heartbeats; the latest life of a node and its latest beat count."""

    def __init__(self) -> None:
        self.infos: dict[str, NodeInfo] = {}
        self.loads: dict[str, NodeLoad] = {}
        self.completed = asyncio.Event()
        """Set while every node that spoke at all has both announced itself and sent a heartbeat of that life."""

    def on_info(self, info: NodeInfo) -> None:
        self.infos[info.ref.node] = info
        self._update()

    def on_load(self, load: NodeLoad) -> None:
        known = self.loads.get(load.node)
        if known is None or known.incarnation != load.incarnation or load.seq >= known.seq:
            self.loads[load.node] = load
            self._update()

    def _update(self) -> None:
        lives = {node: info.ref.incarnation for node, info in self.infos.items()}
        beats = {node: load.incarnation for node, load in self.loads.items()}
        if lives == beats:
            self.completed.set()
        else:
            self.completed.clear()

    def status(self, nats_url: str) -> ClusterStatus:
        nodes = tuple(sorted((_node(self.infos[n], self.loads.get(n)) for n in self.infos), key=_order))
        return ClusterStatus(
            nats_url=nats_url,
            nodes=nodes,
            running=sum(n.running for n in nodes if n.role != "gateway"),
            waiting=sum(n.waiting for n in nodes if n.role != "gateway"),
            kv_blocks_held=sum(n.kv_blocks_held for n in nodes),
            kv_blocks_cached=sum(n.kv_blocks_cached for n in nodes),
            hit_rate=hit_rate(*(n.counters for n in nodes if n.role in COMPUTE)),
        )


def hit_rate(*counters: dict[str, float]) -> float | None:
    """Hit rate over all given nodes; None before anything was prefilled."""
    computed = sum(c.get("prompt_tokens_computed", 0.0) for c in counters)
    cached = sum(c.get("cached_tokens", 0.0) for c in counters)
    return cached / (cached + computed) if cached + computed > 0 else None


def _order(node: NodeStatus) -> tuple[int, str]:
    return ROLES.index(node.role) if node.role in ROLES else len(ROLES), node.node


def _node(info: NodeInfo, load: NodeLoad | None) -> NodeStatus:
    if load is not None and load.incarnation != info.ref.incarnation:
        load = None  # from an earlier life
    counters = load.counters if load is not None else {}
    return NodeStatus(
        node=info.ref.node, role=info.role, stage=load.stage if load is not None else info.stage, detail=info.detail,
        incarnation=info.ref.incarnation, host=info.ref.host, pid=info.pid,
        model=info.model.name if info.model is not None else "",
        kv_token_bytes=info.model.layout.token_bytes if info.model is not None else 0,
        running=load.running if load is not None else 0, waiting=load.waiting if load is not None else 0,
        kv_blocks=(load.kv_blocks if load is not None else 0) or info.kv_blocks,
        kv_blocks_held=load.kv_blocks_held if load is not None else 0,
        kv_blocks_cached=load.kv_blocks_cached if load is not None else 0,
        queue_s=load.queue_s if load is not None else 0.0, batch_tokens=load.batch_tokens if load is not None else 0,
        hit_rate=hit_rate(counters) if info.role in COMPUTE else None, counters=counters,
    )  # fmt: skip


async def ask(nats_url: str) -> ClusterStatus:
    """Call the roll and listen for a moment. Raises ToolError if no bus answers, or nobody on it."""
    return (await listen(nats_url)).status(nats_url)


async def listen(nats_url: str) -> RollBook:
    """What `ask` is made of: every node's announcement and last heartbeat."""
    try:
        async with asyncio.timeout(CONNECT_S):
            bus = await connect(nats_url, name="status")
    except TimeoutError:
        raise ToolError(
            f"no nats-server answers at {nats_url}; is a cluster up? Start one with `tsukimi up`."
        ) from None
    book = RollBook()
    try:
        await bus.subscribe_ordered(ANNOUNCE, NodeInfo, book.on_info)
        await bus.subscribe_ordered(HEARTBEAT_ALL, NodeLoad, book.on_load)
        await bus.publish(ROLL_CALL, RollCall(asked_by="status"))
        await asyncio.sleep(SETTLE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(book.completed.wait(), LISTEN_S - SETTLE_S)
    finally:
        await bus.close()
    if not book.infos:
        raise ToolError(f"nats-server at {nats_url} answers, but no Tsukimi node does.")
    return book


def to_json(status: ClusterStatus) -> str:
    return msgspec.json.format(msgspec.json.encode(status)).decode()


def show(status: ClusterStatus, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, justify in (
        ("node", "left"), ("stage", "left"), ("running", "right"), ("waiting", "right"), ("queue", "right"),
        ("KV held", "right"), ("cached", "right"), ("of", "right"), ("hit rate", "right"), ("done", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=heading != "done")  # type: ignore[arg-type]
    for n in status.nodes:
        kv = (
            [str(n.kv_blocks_held), str(n.kv_blocks_cached), str(n.kv_blocks)]
            if n.kv_blocks
            else ["", "", ""]
        )
        doing = f" ({n.detail})" if n.detail and n.stage != "ready" else ""
        stage = Text(n.stage + doing, style=STYLES.get(n.stage, "cyan"))
        queue = f"{n.queue_s:.2f} s" if n.role == "prefill" else ""
        table.add_row(
            n.node,
            stage,
            str(n.running),
            str(n.waiting),
            queue,
            *kv,
            _percent(n.hit_rate),
            Text(_done(n), style="dim"),
        )
    console.print(table)
    console.print(
        f"\n{status.running} running, {status.waiting} waiting; KV blocks: {status.kv_blocks_held} held, "
        f"{status.kv_blocks_cached} cached; hit rate {_percent(status.hit_rate) or 'not known yet'}. "
        f"Bus: {status.nats_url}",
        highlight=False,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.1f} %"


TELLING = {
    "requests_started": "requests",
    "placed": "placed",
    "refused": "refused",
    "prompt_tokens_computed": "prompt tokens",
    "tokens_generated": "tokens",
    "blocks_stored": "blocks stored",
    "blocks_served": "served",
    "bytes_received": "in",
    "bytes_sent": "out",
}  # fmt: skip


def _done(node: NodeStatus) -> str:
    """The few totals that get a line."""
    parts: list[str] = []
    for key, word in TELLING.items():
        value: Any = node.counters.get(key)
        if value:
            parts.append(
                f"{word} {value / (1 << 20):.1f} MiB" if key.startswith("bytes") else f"{value:.0f} {word}"
            )
    return ", ".join(parts)
