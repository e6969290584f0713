"""What a trace on a live cluster gave, beside what the simulator says of the same rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tsukimi.simulate.measure import mean_of_longest, spread
from tsukimi.traffic.asking import Sample
from tsukimi.traffic.trace_rows import ScaledTrace


class Compared(Struct, frozen=True):
    """One measure."""

    name: str
    live: float
    simulated: float
    unit: str
    """`s`: compared as a ratio; `share`: as a difference."""

    @property
    def off(self) -> float:
        """Simulated against live: by which part, or by how much for a share."""
        if self.unit == "share":
            return self.simulated - self.live
        return self.simulated / self.live - 1.0 if self.live else 0.0


class TraceReport(Struct, frozen=True):
    settings: Any
    rows: int
    cut: int
    """Rows shortened because they did not fit the model's context."""
    block_tokens: int
    """Length of a scaled block of the trace."""
    capacity_per_s: float
    """0: not measured."""
    speed: float
    rate_per_s: float
    completed: int
    failures: dict[str, int]
    worst_delay_s: float
    """Seconds by which this client was late in sending a request."""
    compared: tuple[Compared, ...]
    simulated: dict[str, Any]
    samples: tuple[Sample, ...]


def compare(
    settings: Any,
    trace: ScaledTrace,
    samples: list[Sample],
    simulated: dict[str, Any],
    *,
    capacity: float,
    speed: float,
) -> TraceReport:
    good = [s for s in samples if not s.reason]
    ttft = spread([s.ttft_s for s in good if s.ttft_s is not None])
    tbt = spread([mean_of_longest([(g, g, 1) for g in s.gaps_s]) for s in good if s.gaps_s])
    prompt = sum(s.prompt_tokens for s in good)
    span_s = max(s.sent_s for s in samples) - min(s.sent_s for s in samples)
    rows = [
        Compared(
            "hit rate", sum(s.cached_tokens for s in good) / max(1, prompt), simulated["hit_rate"], "share"
        ),
        Compared("goodput", _goodput(settings, samples), simulated["goodput"], "share"),
    ]
    for name, live, key in (("TTFT", ttft, "ttft_s"), ("TBT", tbt, "tbt_s")):
        rows += [
            Compared(f"{name} {p}", live[p], simulated[key][p], "s") for p in ("mean", "p50", "p90", "p99")
        ]
    return TraceReport(
        settings=settings,
        rows=len(samples),
        cut=trace.cut,
        block_tokens=trace.block_tokens,
        capacity_per_s=capacity,
        speed=speed,
        rate_per_s=(len(samples) - 1) / span_s if span_s else 0.0,
        completed=len(good),
        failures=dict(Counter(s.reason for s in samples if s.reason).most_common()),
        worst_delay_s=max(s.sent_s - s.due_s for s in samples),
        compared=tuple(rows),
        simulated=simulated,
        samples=tuple(samples),
    )


def _goodput(settings: Any, samples: list[Sample]) -> float:
    met = 0
    for s in samples:
        if s.reason or s.ttft_s is None:
            continue
        tbt = mean_of_longest([(g, g, 1) for g in s.gaps_s]) if s.gaps_s else 0.0
        in_time = not settings.ttft_slo_s or s.ttft_s <= settings.ttft_slo_s
        met += in_time and (not settings.tbt_slo_s or tbt <= settings.tbt_slo_s)
    return met / len(samples)


def show(report: TraceReport, console: Console) -> None:
    console.print(
        f"{report.rows} rows at {report.rate_per_s:.2f} requests/s"
        + (f", capacity {report.capacity_per_s:.2f}/s" if report.capacity_per_s else "")
        + f", {report.speed:g} times as fast as recorded",
        style="bold",
        highlight=False,
    )
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("", "live", "simulated", "off by"):
        table.add_column(heading, justify="right" if heading else "left")
    for c in report.compared:
        if c.unit == "share":
            cells = (f"{c.live:.1%}", f"{c.simulated:.1%}", f"{100 * c.off:+.1f} points")
        else:
            cells = (f"{c.live:.3f} s", f"{c.simulated:.3f} s", f"{c.off:+.1%}")
        table.add_row(c.name, *cells)
    console.print(table)
    failed = sum(report.failures.values())
    kinds = ", ".join(f"{n} x {reason}" for reason, n in report.failures.items())
    console.print(
        f"{report.completed} completed, {failed} failed{': ' + kinds if kinds else ''}; "
        f"TBT is the mean of an answer's longest tenth of gaps; {report.cut} rows were cut to the model's context; "
        f"the client was late by at most {report.worst_delay_s * 1000:.0f} ms",
        highlight=False,
        soft_wrap=True,
    )
