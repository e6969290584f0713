"""The examples of tests/examples do what they say, through the doors that users take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.gateway.generation.metrics.request_metrics import Metrics
from services.prefill.config import Config as PrefillConfig
from shared.core.conductor.membership import Member
from shared.core.kv.eviction import POLICIES, PageUse
from shared.core.kv.pool import BlockPool
from shared.core.worker.steps import SequenceStep
from shared.core.worker.transfers import OpenHandoff
from shared.engine.api import EngineConfig
from shared.engine.load import load_engine
from shared.io.plugins.classes import register
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef
from shared.protocol.requests import HandoffTarget
from shared.protocol.sampling import SamplingParams
from tests.examples.engine import PacedEngine
from tests.examples.metric import CountingNode
from tests.support.fakes.solo_node import solo_node
from tests.support.worlds.traces import dialogues
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import read_trace

PLACEMENT = "tests.examples.placement_policy:StickyOrShortest"
DECODE = "tests.examples.decode_policy:FillOneFirst"
EVICTION = "tests.examples.eviction_policy:LeastOftenUsed"
ENGINE = "tests.examples.engine:PacedEngine"


def test_the_placement_policy_places_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(dialogues(120)))
    requests = read_trace(trace, speed=1.0, requests=0)

    def hit_rate(policy: str) -> float:
        cluster = SimulatedCluster(SimulationConfig(prefill=3, decode=2, policy=policy), requests)
        cluster.run()
        cluster.check()
        return float(report(cluster)["hit_rate"])

    assert hit_rate(PLACEMENT) > hit_rate("random")


def test_the_decode_policy_leaves_nodes_idle_that_are_not_needed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(dialogues(60)))
    requests = read_trace(trace, speed=1.0, requests=0)

    def steps(decode_policy: str) -> list[int]:
        config = SimulationConfig(prefill=3, decode=3, decode_policy=decode_policy)
        cluster = SimulatedCluster(config, requests)
        cluster.run()
        cluster.check()
        nodes = report(cluster)["nodes"]
        return [nodes[f"decode-{i}"]["steps"] for i in range(3)]

    assert all(steps("least_tbt"))
    assert steps(DECODE)[2] == 0


def test_the_eviction_policy_keeps_what_is_used_often() -> None:
    policies = dict(POLICIES)
    register(policies, EVICTION, param="eviction", adapt=lambda policy: policy())
    policy = policies[EVICTION]
    assert policy.rank(PageUse(used_at=9, uses=1)) < policy.rank(PageUse(used_at=1, uses=5))
    pool = BlockPool(2, policy)
    often, once = bytes(16), bytes([1] * 16)
    for key, times in ((often, 3), (once, 1)):
        pages = pool.allocate(1)
        assert pages is not None
        pool.register_chain(pages, (key,), None)
        pool.unpin(pages)
        for _ in range(times - 1):
            pool.unpin(pool.match((key,)))
    assert pool.allocate(1) is not None
    assert pool.keys() == (often,)


def test_the_engine_gives_the_toys_tokens_at_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    config = EngineConfig("toy", engine=ENGINE, kv_bytes=1 << 20)
    paced = load_engine(config, lambda *_: None)
    plain = load_engine(EngineConfig("toy", kv_bytes=1 << 20), lambda *_: None)
    assert isinstance(paced, PacedEngine)
    try:
        ids = b"".join(token.to_bytes(4, "little") for token in (104, 105))
        step = SequenceStep("a", 0, 2, ids, (0,), SamplingParams(temperature=0.0))
        assert paced.run([step]) == plain.run([step])
        assert len(slept) == 1
    finally:
        paced.close()
        plain.close()


async def test_the_metric_appears_at_the_gateway_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrefillConfig(node="prefill-0", model="toy", kv_bytes=1 << 20, shm=False)
    async with solo_node(CountingNode, "prefill", config) as app:
        assert isinstance(app, CountingNode)
        opened: list[OpenHandoff] = []
        monkeypatch.setattr(app.streams, "open_handoff", opened.append)
        target = HandoffTarget(NodeRef("decode-0", "1"), landing=bytes(16))
        app.execute(OpenHandoff("r/0/0", target, pages=(0,)))
        member = Member(app.info(), "ready", 0.0, app.load(1))
    text = Metrics(members=lambda: [member]).render().decode()
    assert len(opened) == 1
    assert 'tsukimi_node_other_total{counter="handoffs_opened",node="prefill-0",role="prefill"} 1.0' in text


def test_an_engine_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match="no_such_engine:Engine"):
        load_engine(EngineConfig("toy", engine="no_such_engine:Engine"), lambda *_: None)
