"""metrics.md: what a gateway's /metrics shows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from services.gateway.generation.metrics.node_metrics import LOADS, OTHER, ROWS, UP, NodeMetric
from services.gateway.generation.metrics.request_metrics import Metrics
from tests.references.table import code, page, table

ABOUT = """\
A gateway shows these at `GET /metrics`. A histogram has the series `_bucket` (with the label `le`), `_sum` and
`_count`."""
NODES = """\
The last heartbeats of the nodes, as this gateway heard them. A family appears once a node reports to it. The second table
says what a node's heartbeats (`tsukimi status --json`) call it. A total that has no row, e.g. a counter of a service of
your own, appears in `tsukimi_node_other_total` under its name."""


def render() -> str:
    head = ("Name", "Type", "Help", "Labels")
    families = {_shown(family): (family, labels) for family, labels in _families()}
    units = {row.family: row.unit for row in (UP, OTHER, *LOADS.values(), *_rows())}
    own = [_row(*families[name]) for name in sorted(families.keys() - units)]
    nodes = [_row(*families[name], units[name]) for name in sorted(units)]
    parts = [
        "## Requests",
        table(head, own),
        "## Nodes",
        NODES,
        table((*head, "Unit"), nodes),
        table(("Role", "In heartbeats", "Name"), sorted(_names())),
    ]
    return page("Metrics", ABOUT, parts)


def _row(family: Metric, labels: tuple[str, ...], *unit: str) -> tuple[str, ...]:
    shown = ", ".join(map(code, labels)) or "none"
    return code(_shown(family)), family.type, family.documentation, shown, *(u or "none" for u in unit)


def _names() -> Iterator[tuple[str, str, str]]:
    for role, rows in ROWS.items():
        for counter, row in rows.items():
            label = f'{{{row.label[0]}="{row.label[1]}"}}' if row.label else ""
            yield role, code(counter), code(row.family + label)


def _rows() -> Iterator[NodeMetric]:
    for rows in ROWS.values():
        yield from rows.values()


def _families() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every family with its labels; the client library keeps both in private fields."""
    for collector in tuple(Metrics(members=tuple)._registry._collector_to_names):
        for family in collector.describe():
            owner = collector if isinstance(collector, MetricWrapperBase) else family
            yield family, tuple(getattr(owner, "_labelnames", ()))


def _shown(family: Metric) -> str:
    """The name as it is scraped: counters end in `_total`."""
    return f"{family.name}_total" if family.type == "counter" else family.name
