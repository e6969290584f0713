"""What a load test found, for people and for programs. Failures are counted separately and are in none of the times."""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tsukimi.simulate.measure import mean_of_longest, spread
from tsukimi.traffic.asking import Sample
from tsukimi.traffic.settings import Load

Spread = dict[str, float] | None
"""mean, p50, p90 and p99 in seconds; None if there was nothing to measure."""


class Goodput(Struct, frozen=True):
    """Requests that met every given objective."""

    requests_per_s: float
    share: float
    """Share of all requests sent, failed ones included."""


class LoadReport(Struct, frozen=True):
    url: str
    load: Load
    seconds: float
    """Seconds from the first sending to the last end."""
    completed: int
    failures: dict[str, int]
    ttft_s: Spread
    tbt_s: Spread
    """Gaps between chunks with text, of all answers together."""
    tpot_s: Spread
    """For each answer: time from its first chunk to its last, divided by the tokens after the first."""
    latency_s: Spread
    output_tokens_per_s: float
    requests_per_s: float
    goodput: Goodput | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_chunk: float
    uncounted: int
    """Answers without a token count from the server: each chunk counts as one token."""
    worst_delay_s: float
    """Seconds by which this client was late in sending a request."""
    samples: tuple[Sample, ...]


def summarise(url: str, load: Load, samples: list[Sample]) -> LoadReport:
    good = [s for s in samples if not s.reason]
    seconds = max(s.sent_s + s.seconds for s in samples) - min(s.sent_s for s in samples)
    tokens, chunks = sum(s.tokens for s in good), sum(s.chunks for s in good)
    return LoadReport(
        url=url,
        load=load,
        seconds=seconds,
        completed=len(good),
        failures=dict(Counter(s.reason for s in samples if s.reason).most_common()),
        ttft_s=_spread([s.ttft_s for s in good if s.ttft_s is not None]),
        tbt_s=_spread([gap for s in good for gap in s.gaps_s]),
        tpot_s=_spread([sum(s.gaps_s) / (s.tokens - 1) for s in good if s.gaps_s and s.tokens > 1]),
        latency_s=_spread([s.seconds for s in good]),
        output_tokens_per_s=tokens / seconds,
        requests_per_s=len(good) / seconds,
        goodput=_goodput(load, samples, seconds),
        prompt_tokens=sum(s.prompt_tokens for s in good),
        cached_tokens=sum(s.cached_tokens for s in good),
        output_tokens=tokens,
        tokens_per_chunk=tokens / chunks if chunks else 0.0,
        uncounted=sum(s.completion_tokens == 0 for s in good),
        worst_delay_s=max(s.sent_s - s.due_s for s in samples),
        samples=tuple(samples),
    )


def _spread(values: list[float]) -> Spread:
    return spread(values) if values else None


def _goodput(load: Load, samples: list[Sample], seconds: float) -> Goodput | None:
    if not (load.ttft_slo_s or load.tbt_slo_s):
        return None
    met = sum(_in_time(load, s) for s in samples)
    return Goodput(met / seconds, met / len(samples))


def _in_time(load: Load, sample: Sample) -> bool:
    """An answer's TBT is the mean of the longest tenth of its gaps, as in the simulator."""
    if sample.reason or sample.ttft_s is None:
        return False
    if load.ttft_slo_s and sample.ttft_s > load.ttft_slo_s:
        return False
    longest = mean_of_longest([(gap, gap, 1) for gap in sample.gaps_s]) if sample.gaps_s else 0.0
    return not load.tbt_slo_s or longest <= load.tbt_slo_s


def show(report: LoadReport, console: Console) -> None:
    load = report.load
    how = f"open loop, {load.rate:g} requests/s" if load.rate else f"closed loop, {load.concurrency} at once"
    console.print(
        f"{load.model} at {report.url}: {how}, {load.requests} requests", style="bold", highlight=False
    )
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("", "mean", "p50", "p90", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values, scale in (
        ("TTFT s", report.ttft_s, 1.0), ("TBT ms", report.tbt_s, 1000.0),
        ("time per output token ms", report.tpot_s, 1000.0), ("latency s", report.latency_s, 1.0),
    ):  # fmt: skip
        cells = (
            [f"{v * scale:.{3 if scale == 1.0 else 1}f}" for v in values.values()] if values else ["-"] * 4
        )
        table.add_row(name, *cells)
    table.add_row("output tokens/s", f"{report.output_tokens_per_s:.1f}")
    table.add_row("requests/s", f"{report.requests_per_s:.2f}")
    if report.goodput is not None:
        table.add_row("goodput requests/s", f"{report.goodput.requests_per_s:.2f}")
        table.add_row("goodput % of sent", f"{100 * report.goodput.share:.1f}")
    console.print(table)
    for line in _remarks(report):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _remarks(report: LoadReport) -> list[str]:
    failed = sum(report.failures.values())
    lines = [
        f"{report.completed} of {report.completed + failed} requests completed in {report.seconds:.2f} s"
    ]
    if failed:
        kinds = ", ".join(f"{n} x {reason}" for reason, n in report.failures.items())
        lines[0] += f"; {failed} failed and count in no time above: {kinds}"
    good = max(1, report.completed)
    lines.append(
        f"tokens per request: {report.prompt_tokens / good:.1f} in ({report.cached_tokens / good:.1f} from a cache), "
        f"{report.output_tokens / good:.1f} out"
    )
    lines.append(
        "TBT is the gap between a chunk with text and the next, whatever is in it; "
        f"a chunk has {report.tokens_per_chunk:.2f} tokens on average"
    )
    if report.uncounted:
        lines.append(f"{report.uncounted} answers came without usage: each chunk is counted as a token")
    if report.worst_delay_s > 0.05:
        lines.append(f"this client was late to send a request by up to {report.worst_delay_s:.2f} s")
    return lines


def to_json(report: LoadReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
