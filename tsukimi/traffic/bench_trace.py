"""`tsukimi bench trace`: a recorded trace on a live cluster, beside the simulator fed with the same rows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.protocol.cluster import NodeInfo, NodeLoad
from tsukimi import cluster_url, status
from tsukimi.errors import ToolError
from tsukimi.simulate.trace import read_trace
from tsukimi.traffic.asking import Sample
from tsukimi.traffic.settings import Load
from tsukimi.traffic.trace_calibration import Undisturbed, calibrate
from tsukimi.traffic.trace_load import replay_rows, saturated_rate
from tsukimi.traffic.trace_report import TraceReport, compare, show
from tsukimi.traffic.trace_rows import Prompts, ScaledTrace, as_simulated, scale_rows
from tsukimi.traffic.trace_twin import compute_nodes, fitted_cost, simulate_rows, twin_config

FIRST_ORDINARY_ID = 100
"""Token ids below it are often special ones."""
SATURATION_ROWS = 60
"""Rows whose throughput is the cluster's capacity."""
SATURATION_CLIENTS = 16


class TraceLoad(Struct, frozen=True, kw_only=True):
    trace: Path
    scale: float = 1 / 32
    requests: int = 200
    speed: float = 0.0
    """How many times as fast as recorded. 0: as fast as `load` asks."""
    load: float = 0.5
    """Share of the capacity, which is measured before: requests a second that a cluster which never rests answers."""
    most_output_tokens: int = 1 << 20
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    policy: str = "kvcache_centric"
    """Of the simulated conductor; the live one has its own configuration."""


def bench_trace(
    load: TraceLoad, url: str, nats_url: str, api_key: str, json: Path | None, console: Console
) -> None:
    """Raises ToolError if the cluster can't be reached or answers nothing, Invalid for a trace that can't be read."""
    if json is not None and not json.parent.is_dir():
        raise ToolError(f"there is no folder {json.parent} to write {json.name} to.")
    infos, loads = _nodes(nats_url)
    model = next((i.model for i in infos if i.role == "decode" and i.model is not None), None)
    if model is None:
        raise ToolError("no decode node has announced its model.")
    trace = scale_rows(
        read_trace(load.trace, requests=load.requests + SATURATION_ROWS),
        load.scale,
        kv_block_tokens=model.layout.block_tokens,
        context_tokens=model.context_tokens,
        most_output_tokens=load.most_output_tokens,
    )
    rows, more = trace.rows[: load.requests], trace.rows[load.requests :]
    if not rows:
        raise ToolError(f"{load.trace} has no row.")
    ids, avoid = range(min(FIRST_ORDINARY_ID, model.vocab_size // 2), model.vocab_size), model.eos_token_ids

    def prompts() -> Prompts:
        return Prompts(trace, ids=ids, avoid=avoid, salt=secrets.token_hex(8))

    asked = Load(
        model=model.name, requests=len(rows), concurrency=SATURATION_CLIENTS, warmup=0, ignore_eos=True,
        ttft_slo_s=load.ttft_slo_s, tbt_slo_s=load.tbt_slo_s,
    )  # fmt: skip
    undisturbed = uvloop.run(
        calibrate(
            url, api_key, asked, [i for i in ids if i not in avoid], fitted_cost(infos, loads),
            context_tokens=model.context_tokens, prefills=len(compute_nodes(infos)[0]),
        )
    )  # fmt: skip
    capacity = 0.0
    speed = load.speed
    if not speed:
        with _progress(console, "capacity", len(more or rows)) as told:
            capacity = uvloop.run(saturated_rate(url, api_key, asked, more or rows, prompts(), told))
        if not capacity:
            raise ToolError("the cluster answered no request; see its logs, or try `tsukimi probe`.")
        speed = load.load * capacity / _recorded_rate(rows)
        _until_idle(nats_url)
    with _progress(console, "trace", len(rows)) as told:
        samples = uvloop.run(replay_rows(url, api_key, asked, rows, prompts(), speed, told))
    _until_idle(nats_url)
    report = _compared(load, trace, samples, undisturbed, capacity, speed, *_nodes(nats_url))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2) + b"\n")
    if not any(not s.reason for s in samples):
        raise ToolError(f"no request succeeded. The first: {samples[0].error}")
    show(report, console)


def _compared(
    load: TraceLoad,
    trace: ScaledTrace,
    samples: list[Sample],
    undisturbed: Undisturbed,
    capacity: float,
    speed: float,
    infos: Sequence[NodeInfo],
    loads: Sequence[NodeLoad],
) -> TraceReport:
    """The twin gets each row at the time at which it was really sent."""
    config = twin_config(infos, loads, undisturbed, policy=load.policy, message_s=MESSAGE_S)
    config = msgspec.structs.replace(config, ttft_slo_s=load.ttft_slo_s, tbt_slo_s=load.tbt_slo_s)
    rows = msgspec.structs.replace(trace, rows=trace.rows[: load.requests])
    sent = {s.number: s.sent_s for s in samples}
    requests = sorted(
        (msgspec.structs.replace(r, arrival_s=sent[r.number]) for r in as_simulated(rows, speed)),
        key=lambda r: r.arrival_s,
    )
    requests = [msgspec.structs.replace(r, number=i) for i, r in enumerate(requests)]
    simulated = simulate_rows(config, requests)
    return compare(load, trace, samples, simulated, capacity=capacity, speed=speed)


MESSAGE_S = 0.001
"""A message between two processes of one machine, its handling included."""


def _recorded_rate(rows: Sequence[Any]) -> float:
    """Requests a second."""
    span_s: float = rows[-1].arrival_s - rows[0].arrival_s
    return (len(rows) - 1) / span_s if span_s > 0 else float(len(rows))


def _nodes(nats_url: str) -> tuple[list[NodeInfo], list[NodeLoad]]:
    book = asyncio.run(status.listen(nats_url))
    return list(book.infos.values()), list(book.loads.values())


def _until_idle(nats_url: str) -> None:
    for _ in range(60):
        _, loads = _nodes(nats_url)
        if not any(load.running or load.waiting for load in loads):
            return


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[Sample], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(name, total=total)
        yield lambda sample: progress.update(task, advance=1)


def urls(url: str, nats: str, run_dir: Path) -> tuple[str, str]:
    """The gateway's and the bus's."""
    return cluster_url.http_url(url, run_dir).rstrip("/").removesuffix("/v1"), cluster_url.nats_url(
        nats, run_dir
    )
