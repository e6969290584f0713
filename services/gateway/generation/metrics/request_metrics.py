"""What a gateway counts and shows. At all times: started = ok + error + aborted + rejected + running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.generation.generation import Generation
from services.gateway.generation.metrics.node_metrics import LOADS, ROWS, UP, NodeMetric, node_metric
from services.gateway.generation.metrics.prediction_metrics import PredictionMetrics
from shared.core.conductor.membership import Member
from shared.protocol.errors import Cancelled, Invalid, Overloaded, Unavailable

log = structlog.get_logger(__name__)
disable_created_metrics()  # type: ignore[no-untyped-call]

Outcome = Literal["ok", "error", "aborted", "rejected"]
TOKEN_KINDS = ("prompt", "cached", "completion")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Tracked:
    """One request, from its arrival to its end."""

    def __init__(self, front: str, kind: str, request_id: str) -> None:
        self.front, self.kind, self.request_id = front, kind, request_id
        self.began = time.monotonic()
        self.first_text_at: float | None = None
        self.generation: Generation | None = None

    def text_sent(self) -> None:
        """The first text (no role, no empty piece) is on its way to the client."""
        if self.first_text_at is None:
            self.first_text_at = time.monotonic()


class Metrics:
    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._registry = registry = CollectorRegistry()
        self._started = Counter(
            "tsukimi_requests_started", "Generation requests that arrived", registry=registry
        )
        self._ended = Counter(
            "tsukimi_requests_ended", "Generation requests by outcome", ["outcome"], registry=registry
        )
        self._running = Gauge("tsukimi_requests_running", "Generation requests not ended", registry=registry)
        self._ttft = Histogram(
            "tsukimi_ttft_seconds", "Arrival to first text", buckets=SECONDS, registry=registry
        )
        self._duration = Histogram(
            "tsukimi_request_seconds", "Arrival to end", buckets=SECONDS, registry=registry
        )
        self._tokens = Counter("tsukimi_tokens", "Tokens of requests that ended", ["kind"], registry=registry)
        self._events = Counter(
            "tsukimi_gateway_events",
            "Attempts, questions, late tokens and the like",
            ["event"],
            registry=registry,
        )
        for outcome in get_args(Outcome):
            self._ended.labels(outcome)
        self._predictions = PredictionMetrics(registry)
        registry.register(NodeCollector(members))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Every family that may be shown."""
        for collector in tuple(self._registry._collector_to_names):
            yield from collector.describe()  # type: ignore[attr-defined]

    def count(self, event: str, by: int = 1) -> None:
        self._events.labels(event).inc(by)

    @contextmanager
    def track(self, front: str, kind: str, request_id: str) -> Iterator[Tracked]:
        """Count the request as ended, exactly once. The way the block is left decides how it ended."""
        tracked = Tracked(front, kind, request_id)
        self._started.inc()
        self._running.inc()
        error: BaseException | None = None
        try:
            yield tracked
        except BaseException as e:
            error = e
            raise
        finally:
            self._running.dec()
            self._end(tracked, outcome_of(error, tracked.generation is not None), error)

    def totals(self) -> dict[str, float]:
        """For heartbeats."""
        ended = {
            f"requests_{o}": self.value("tsukimi_requests_ended_total", outcome=o) for o in get_args(Outcome)
        }
        tokens = {f"{kind}_tokens": self.value("tsukimi_tokens_total", kind=kind) for kind in TOKEN_KINDS}
        return {"requests_started": self.value("tsukimi_requests_started_total"), **ended, **tokens}

    def check(self) -> None:
        started = self.value("tsukimi_requests_started_total")
        ended = sum(self.value("tsukimi_requests_ended_total", outcome=o) for o in get_args(Outcome))
        running = self.value("tsukimi_requests_running")
        assert started == ended + running, f"{started} started, {ended} ended, {running} running"
        assert running >= 0

    def value(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0

    def _end(self, tracked: Tracked, outcome: Outcome, error: BaseException | None) -> None:
        self._ended.labels(outcome).inc()
        seconds = time.monotonic() - tracked.began
        facts: dict[str, object] = {}
        if (generation := tracked.generation) is not None:
            facts = self._facts(generation)
            self._duration.observe(seconds)
        if tracked.first_text_at is not None:
            ttft_s = tracked.first_text_at - tracked.began
            self._ttft.observe(ttft_s)
            facts["ttft_s"] = round(ttft_s, 4)
        if error is not None:
            facts["error"] = str(error) or type(error).__name__
        log.info(
            "request_finished",
            request_id=tracked.request_id,
            front=tracked.front,
            kind=tracked.kind,
            outcome=outcome,
            seconds=round(seconds, 4),
            **facts,
        )

    def _facts(self, generation: Generation) -> dict[str, object]:
        usage = generation.usage
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("completion").inc(usage.completion_tokens)
        machines = [choice.machine for choice in generation.choices]
        for machine in machines:
            self._predictions.ended(machine)
        attempts = sum(m.attempts for m in machines)
        self.count("attempts", attempts)
        self.count("retries", attempts - len(machines))
        self.count("questions", sum(m.syncs for m in machines))
        self.count("tokens_late", sum(m.late for m in machines))
        self.count("tokens_repeated", sum(m.order.duplicates for m in machines))
        return {
            "request": generation.request.id,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "attempts": attempts,
            "nodes": sorted({node for m in machines for node in m.nodes}),
        }


def outcome_of(error: BaseException | None, began: bool) -> Outcome:
    """`began`: whether generation had begun. A refusal of ours before that is a rejection."""
    match error:
        case None:
            return "ok"
        case Invalid() | Overloaded():
            return "rejected"
        case Cancelled() | asyncio.CancelledError() | GeneratorExit():
            return "aborted"
        case Unavailable() if not began:
            return "rejected"
    return "error"


class NodeCollector(Collector):
    """The nodes' own totals and loads, from their last heartbeats."""

    def __init__(self, members: Callable[[], Iterable[Member]]) -> None:
        self._members = members

    def describe(self) -> list[Metric]:
        """Every family that may be collected, without samples."""
        rows = [UP, *LOADS.values(), *(row for rows in ROWS.values() for row in rows.values())]
        return list({row.family: _family(row) for row in (*rows, node_metric("gateway", ""))}.values())

    def collect(self) -> list[Metric]:
        """The families that some node reports to."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

        def add(member: Member, row: NodeMetric, value: float) -> None:
            family = families.setdefault(row.family, _family(row))
            labels = [member.ref.node, member.info.role, *(row.label[1:] if row.label else ())]
            family.add_metric(labels, value)

        for member in self._members():
            add(member, UP, float(member.alive))
            if (load := member.load) is None:
                continue
            for field, row in LOADS.items():
                add(member, row, float(getattr(load, field)))
            for counter, value in sorted(load.counters.items()):
                add(member, node_metric(member.info.role, counter), value)
        return [families[name] for name in sorted(families)]


def _family(row: NodeMetric) -> GaugeMetricFamily | CounterMetricFamily:
    labels = ["node", "role", *(row.label[:1] if row.label else ())]
    if row.kind == "gauge":
        return GaugeMetricFamily(row.family, row.help, labels=labels)
    return CounterMetricFamily(row.family, row.help, labels=labels)
