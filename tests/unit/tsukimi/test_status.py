from __future__ import annotations

import json

import pytest

from shared.protocol.cluster import NodeInfo, NodeLoad
from shared.protocol.ids import NodeRef, Role
from tests.support.processes.nats import nats_server
from tsukimi.errors import ToolError
from tsukimi.status import RollBook, ask, hit_rate, to_json


def info(node: str, role: Role, life: str = "a") -> NodeInfo:
    return NodeInfo(ref=NodeRef(node=node, incarnation=life, host="h"), role=role, stage="ready", pid=7)


def load(node: str, role: Role, seq: int = 1, life: str = "a", **more: object) -> NodeLoad:
    return NodeLoad(node=node, incarnation=life, role=role, seq=seq, stage="ready", **more)  # type: ignore[arg-type]


async def test_totals_and_order() -> None:
    book = RollBook()
    book.on_info(info("decode-0", "decode"))
    book.on_info(info("gateway-0", "gateway"))
    book.on_load(load("decode-0", "decode", running=2, kv_blocks_held=3, kv_blocks_cached=4))
    book.on_load(load("gateway-0", "gateway", running=2))
    status = book.status("nats://x")
    assert [n.node for n in status.nodes] == ["gateway-0", "decode-0"]
    assert (status.running, status.kv_blocks_held, status.kv_blocks_cached) == (2, 3, 4)
    assert json.loads(to_json(status))["nodes"][1]["kv_blocks_held"] == 3


async def test_a_beat_of_an_earlier_life_counts_nothing() -> None:
    book = RollBook()
    book.on_load(load("decode-0", "decode", life="old", running=9))
    book.on_info(info("decode-0", "decode", life="new"))
    assert not book.completed.is_set()
    assert book.status("nats://x").running == 0
    book.on_load(load("decode-0", "decode", life="new", running=1))
    assert book.completed.is_set()
    assert book.status("nats://x").running == 1


async def test_the_latest_beat_counts() -> None:
    book = RollBook()
    book.on_info(info("decode-0", "decode"))
    book.on_load(load("decode-0", "decode", seq=5, running=1))
    book.on_load(load("decode-0", "decode", seq=4, running=9))
    assert book.status("nats://x").running == 1


def test_hit_rate_is_of_prompt_tokens() -> None:
    assert hit_rate({}) is None
    assert (
        hit_rate({"prompt_tokens_computed": 30, "cached_tokens": 10}, {"prompt_tokens_computed": 0}) == 0.25
    )


async def test_nobody_on_the_bus_is_said() -> None:
    async with nats_server() as server:
        with pytest.raises(ToolError, match="no Tsukimi node"):
            await ask(server.url)


async def test_no_bus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsukimi.status.CONNECT_S", 0.2)
    with pytest.raises(ToolError, match="no nats-server answers"):
        await ask("nats://127.0.0.1:1")
