"""`tsukimi bench stack`: whole clusters under load, next to transformers' static generate in the same run."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tsukimi.client import Client
from tsukimi.errors import ToolError
from tsukimi.prompts import never_seen
from tsukimi.traffic.asking import Sample
from tsukimi.traffic.clusters import BenchCluster, cluster
from tsukimi.traffic.drive import drive, fitting_words
from tsukimi.traffic.report import summarise
from tsukimi.traffic.settings import Load

TOPOLOGIES = {
    "colocated": ("--prefill", "0", "--decode", "1", "--threads", "2"),
    "disaggregated": ("--prefill", "1", "--decode", "1", "--threads", "1"),
}
"""Both use two compute threads in all, as transformers does."""
PEER_THREADS = 2


class StackReport(Struct, frozen=True):
    load: Load
    dtype: str
    tokens_per_s: dict[str, tuple[float, ...]]
    """Output tokens per second, for each topology and for `transformers`; a value per round."""
    ratios: dict[str, float]
    """Median throughput divided by that of transformers."""
    engine_shares: dict[str, tuple[dict[str, float], ...]]
    """Share of the time under load in which each node's engine computed, for each topology; a value per round. What a
    fully loaded worker lacks to 1 is spent around its engine: gateway, bus, batching, asyncio."""


class Peer:
    """transformers in its own process, which computes only when asked."""

    def __init__(self, load: Load, dtype: str) -> None:
        self._tokens = load.concurrency * load.output_tokens
        arguments = {
            "model": load.model, "threads": PEER_THREADS, "batch": load.concurrency, "dtype": dtype,
            "input-tokens": load.input_tokens, "output-tokens": load.output_tokens,
        }  # fmt: skip
        options = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shared.engine.bench.generate", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._line()

    def tokens_per_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._tokens / float(self._line())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ToolError(f"transformers' process ended with {self._process.wait()}.")
        return line


def bench_stack(load: Load, dtype: str, rounds: int, json: Path | None, console: Console) -> None:
    """Raises ToolError if a cluster does not start or a request fails."""
    found: dict[str, list[float]] = {name: [] for name in (*TOPOLOGIES, "transformers")}
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in TOPOLOGIES}
    peer = Peer(load, dtype)
    try:
        for topology, flags in TOPOLOGIES.items():
            console.print(f"starting a cluster: {' '.join(flags)}")
            with cluster("--model", load.model, "--dtype", dtype, *flags) as running:
                for i in range(rounds):
                    tokens_per_s, share = _measured(running, load)
                    found[topology].append(tokens_per_s)
                    shares[topology].append(share)
                    found["transformers"].append(peer.tokens_per_s())
                    ours, theirs = found[topology][-1], found["transformers"][-1]
                    console.print(f"{topology} {i + 1}: {ours:.1f} tokens/s, transformers {theirs:.1f}")
    finally:
        peer.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    report = StackReport(
        load,
        dtype,
        {name: tuple(values) for name, values in found.items()},
        {name: medians[name] / medians["transformers"] for name in TOPOLOGIES},
        {name: tuple(values) for name, values in shares.items()},
    )
    _show(report, medians, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _measured(running: BenchCluster, load: Load) -> tuple[float, dict[str, float]]:
    """Output tokens per second, and the share of the time that each engine computed."""
    client = Client(running.url)
    try:
        load = replace(load, model=client.first_model())
        words = fitting_words(client, load, never_seen())
    finally:
        client.close()
    load = replace(load, warmup=0)
    uvloop.run(drive(running.url, "", replace(load, requests=1), words, _nobody))  # a warm-up, not measured
    before = running.engine_s()
    samples = uvloop.run(drive(running.url, "", load, words, _nobody))
    report = summarise(running.url, load, samples)
    if report.failures:
        raise ToolError(f"requests failed: {report.failures}")
    computed = {
        node: (after_s - before[node]) / report.seconds for node, after_s in running.engine_s().items()
    }
    return report.output_tokens_per_s, computed


def _nobody(sample: Sample) -> None:
    """Hears of it."""


def _show(report: StackReport, medians: dict[str, float], console: Console) -> None:
    load = report.load
    table = Table(
        title=f"{load.model} {report.dtype}: {load.concurrency} at once, {load.input_tokens} in, {load.output_tokens} out"
    )
    for column in ("", "output tokens/s", "to transformers", "engine computes"):
        table.add_column(column, justify="right")
    for name, value in medians.items():
        if name not in report.ratios:
            table.add_row(name, f"{value:.1f}", "", "")
            continue
        rounds = report.engine_shares[name]
        shares = (f"{node} {statistics.median(r[node] for r in rounds):.0%}" for node in rounds[0])
        table.add_row(name, f"{value:.1f}", f"{report.ratios[name]:.2f}", ", ".join(shares))
    console.print(table)
