"""What nodes really report is what the gateway has names for; the names are what Prometheus expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client.core import Metric

from services.cache_node.app import CacheNode
from services.cache_node.config import CacheNodeConfig
from services.conductor.app import ConductorApp
from services.conductor.config import Config as ConductorConfig
from services.decode.app import DecodeNode
from services.decode.config import Config as DecodeConfig
from services.gateway.app import GatewayApp
from services.gateway.config import GatewayConfig
from services.gateway.generation.metrics.node_metrics import (
    LOADS,
    OTHER,
    ROWS,
    UNITS,
    UP,
    NodeMetric,
    node_metric,
)
from services.gateway.generation.metrics.request_metrics import Metrics, NodeCollector
from services.prefill.app import PrefillNode
from services.prefill.config import Config as PrefillConfig
from shared.core.cache import machine as cache
from shared.core.conductor.membership import Member
from shared.core.worker import config as worker
from shared.dataplane.wire.counters import Counters
from shared.io import dispatch, nats_bus
from shared.io.config import BaseConfig
from shared.protocol.cluster import NodeInfo, NodeLoad
from shared.protocol.ids import NodeRef, Role
from tests.support.fakes.solo_node import solo_node

SMALL: dict[str, Any] = {"model": "toy", "kv_bytes": 1 << 20, "shm": False}
NODES: dict[Role, tuple[Callable[..., Any], BaseConfig]] = {
    "gateway": (GatewayApp, GatewayConfig(node="gateway-0", port=0)),
    "conductor": (ConductorApp, ConductorConfig(node="conductor-0")),
    "prefill": (PrefillNode, PrefillConfig(node="prefill-0", **SMALL)),
    "decode": (DecodeNode, DecodeConfig(node="decode-0", **SMALL)),
    "cache": (CacheNode, CacheNodeConfig(node="cache-0", pool_bytes=1 << 20, shm=False)),
}
DECLARED: dict[Role, tuple[str, ...]] = {
    "conductor": (*dispatch.COUNTERS, *nats_bus.COUNTERS),
    "prefill": (*worker.COUNTERS, *Counters.NAMES),
    "decode": (*worker.COUNTERS, *Counters.NAMES),
    "cache": (*cache.COUNTERS, *Counters.NAMES),
}
EVERY: list[NodeMetric] = [
    UP,
    OTHER,
    *LOADS.values(),
    *(row for rows in ROWS.values() for row in rows.values()),
]


@pytest.mark.parametrize("role", sorted(NODES))
async def test_every_total_that_a_node_reports_has_a_row_and_every_row_is_reported(role: Role) -> None:
    build, config = NODES[role]
    waits = role in ("gateway", "conductor")  # for others; their totals are there from the beginning
    async with solo_node(build, role, config, start=not waits) as app:
        reported = set(app.load(1).counters) | set(DECLARED.get(role, ()))
    assert reported - set(ROWS[role]) == set(), "give these a row in node_metrics.py"
    assert set(ROWS[role]) - reported == set(), "nobody reports these any more"


def test_every_field_with_a_metric_is_a_number_of_a_load() -> None:
    load = NodeLoad(node="n", incarnation="1", role="cache", seq=1, stage="ready")
    assert all(isinstance(getattr(load, field), int | float) for field in LOADS)


@pytest.mark.parametrize("family", tuple(Metrics(members=tuple).families()), ids=lambda family: family.name)
def test_names_kinds_and_help_are_as_prometheus_wants_them(family: Metric) -> None:
    """The checks of `promtool check metrics`, for the gateway's own families too."""
    assert re.fullmatch(r"tsukimi_[a-z_]+", family.name)
    assert family.documentation.strip()
    assert not family.documentation.endswith(".")
    words = family.name.split("_")
    assert not {"s", "ms", "milliseconds", "minutes", "kb", "mib", "gauge", "counter", "histogram"} & set(
        words
    )
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), "added when it is scraped"


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.family)
def test_a_row_says_kind_and_unit_in_its_name(row: NodeMetric) -> None:
    assert row.family.endswith("_total") == (row.kind == "counter")
    assert sum(word in UNITS for word in row.family.split("_")) <= 1
    if row.unit in ("seconds", "bytes"):
        assert row.family.removesuffix("_total").endswith(row.unit)


def test_what_is_told_in_seconds_is_shown_in_seconds() -> None:
    named = [*LOADS.items(), *(pair for rows in ROWS.values() for pair in rows.items())]
    in_seconds = {name for name, _ in named if name.endswith("_s")}
    assert in_seconds == {name for name, row in named if row.unit == "seconds"}


def test_rows_of_one_family_agree() -> None:
    by_family: dict[str, NodeMetric] = {}
    for row in EVERY:
        first = by_family.setdefault(row.family, row)
        assert (row.kind, row.help) == (first.kind, first.help)
        assert (row.label is None) == (first.label is None)
        if row.label is not None and first.label is not None:
            assert row.label[0] == first.label[0]


def member(role: Role, **counters: float) -> Member:
    ref = NodeRef(node=f"{role}-0", incarnation="1")
    found = Member(NodeInfo(ref=ref, role=role, stage="ready"), "ready", 0.0)
    found.load = NodeLoad(
        node=ref.node, incarnation="1", role=role, seq=1, stage="ready", queue_s=0.5, counters=counters
    )
    return found


def shown(members: Iterable[Member]) -> str:
    return Metrics(members=lambda: members).render().decode()


def test_one_name_of_two_roles_is_two_metrics() -> None:
    text = shown([member("conductor", refused=3), member("decode", refused=4)])
    assert 'tsukimi_conductor_requests_refused_total{node="conductor-0",role="conductor"} 3.0' in text
    assert 'tsukimi_worker_attempts_refused_total{node="decode-0",role="decode"} 4.0' in text


def test_parts_of_one_meaning_are_labels_of_one_metric() -> None:
    text = shown([member("decode", ended_stop=3, ended_moved=1)])
    assert 'tsukimi_worker_attempts_ended_total{how="stop",node="decode-0",role="decode"} 3.0' in text
    assert 'tsukimi_worker_attempts_ended_total{how="moved",node="decode-0",role="decode"} 1.0' in text
    assert text.count("# TYPE tsukimi_worker_attempts_ended_total counter") == 1


def test_loads_and_points_in_time_are_gauges() -> None:
    text = shown([member("prefill", last_layer_at_s=12.5)])
    assert "# TYPE tsukimi_node_queue_seconds gauge" in text
    assert 'tsukimi_node_queue_seconds{node="prefill-0",role="prefill"} 0.5' in text
    assert "# TYPE tsukimi_worker_last_layer_clock_seconds gauge" in text


def test_a_total_without_a_row_appears_under_its_own_name() -> None:
    text = shown([member("prefill", my_ticks=9)])
    assert 'tsukimi_node_other_total{counter="my_ticks",node="prefill-0",role="prefill"} 9.0' in text
    assert node_metric("prefill", "my_ticks").family == OTHER.family


def test_only_families_that_somebody_reports_to_are_shown() -> None:
    collector = NodeCollector(lambda: [member("cache", puts=1)])
    assert {family.name for family in collector.collect()} < {family.name for family in collector.describe()}
    assert "tsukimi_worker" not in shown([member("cache", puts=1)])
