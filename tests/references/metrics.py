"""metrics.md: what a gateway's /metrics shows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from services.gateway.generation.metrics import Metrics
from tests.references.table import code, page, table

ABOUT = """\
A gateway shows these at `GET /metrics`. A histogram has the series `_bucket` (with the label `le`), `_sum` and
`_count`. The `tsukimi_node` families tell what the nodes' last heartbeats did, as this gateway heard them."""


def render() -> str:
    rows = [
        (code(_shown(family)), family.type, family.documentation, ", ".join(map(code, labels)) or "none")
        for family, labels in _families()
    ]
    return page("Metrics", ABOUT, [table(("Name", "Type", "Help", "Labels"), sorted(rows))])


def _families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every family with its labels; the client library keeps both in private fields."""
    for collector in tuple(Metrics(members=tuple)._registry._collector_to_names):
        for family in collector.collect():
            owner = collector if isinstance(collector, MetricWrapperBase) else family
            yield family, tuple(getattr(owner, "_labelnames", ()))


def _shown(family: Metric) -> str:
    """The name as it is scraped: counters end in `_total`."""
    return f"{family.name}_total" if family.type == "counter" else family.name
