"""`tsukimi bench handoff`: the cost of decoding in another process: KV sent layer by layer, at once, or not at all."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import uvloop
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tsukimi.client import Client, http_options
from tsukimi.errors import ToolError
from tsukimi.prompts import never_seen, text
from tsukimi.traffic.asking import Sample, ask
from tsukimi.traffic.clusters import cluster
from tsukimi.traffic.drive import fitting_words
from tsukimi.traffic.settings import Load

LOCAL = "local"
TOPOLOGIES = {
    LOCAL: ("--prefill", "0", "--decode", "1"),
    "layer by layer": ("--prefill", "1", "--decode", "1"),
    "all at the end": ("--prefill", "1", "--decode", "1", "--set", "prefill.layerwise=false"),
}
KV_MEMORY = "256M"


class Delays(Struct, frozen=True):
    """The delays of one topology: a value per round, and medians relative to the local topology."""

    ttft_s: tuple[float, ...]
    second_token_s: tuple[float, ...]
    """Seconds from the first token to the second, which the first decode step makes."""
    ttft_tax: float = 0.0
    """Median TTFT divided by the local one, minus 1."""
    second_token_tax: float = 0.0
    """Median delay of the second token beyond the local one, as a share of the local TTFT."""


class HandoffReport(Struct, frozen=True):
    load: Load
    dtype: str
    delays: dict[str, Delays]


def bench_handoff(load: Load, dtype: str, rounds: int, json: Path | None, console: Console) -> None:
    """One request at a time, in turns over clusters that are all up. Raises ToolError if one does not start, or a
    request fails."""
    shared = ("--model", load.model, "--dtype", dtype, "--threads", "1", "--kv-memory", KV_MEMORY)
    samples: dict[str, list[Sample]] = {name: [] for name in TOPOLOGIES}
    with ExitStack() as stack:
        urls = {}
        for name, flags in TOPOLOGIES.items():
            console.print(f"starting a cluster: {name}")
            urls[name] = stack.enter_context(cluster(*shared, "--pool-memory", KV_MEMORY, *flags)).url
        words = _words(urls[LOCAL], load)
        for _ in range(rounds):
            for name, url in urls.items():
                samples[name].append(uvloop.run(_asked(url, load, words)))
    report = HandoffReport(load, dtype, _compared(samples))
    _show(report, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _words(url: str, load: Load) -> int:
    client = Client(url)
    try:
        return fitting_words(client, replace(load, model=client.first_model()), never_seen())
    finally:
        client.close()


async def _asked(url: str, load: Load, words: int) -> Sample:
    async with httpx.AsyncClient(**http_options(url, "")) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        prompt = text(never_seen(), words)
        sample = await ask(http, replace(load, model=model), prompt, 0, 0.0, time.perf_counter())
    if sample.reason or len(sample.gaps_s) < 1:
        raise ToolError(f"a request failed: {sample.error or 'it has one token only'}")
    return sample


def _compared(samples: dict[str, list[Sample]]) -> dict[str, Delays]:
    delays = {
        name: Delays(tuple(s.ttft_s or 0.0 for s in got), tuple(s.gaps_s[0] for s in got))
        for name, got in samples.items()
    }
    local_ttft = statistics.median(delays[LOCAL].ttft_s)
    local_second = statistics.median(delays[LOCAL].second_token_s)
    return {
        name: replace(
            of,
            ttft_tax=statistics.median(of.ttft_s) / local_ttft - 1,
            second_token_tax=(statistics.median(of.second_token_s) - local_second) / local_ttft,
        )
        for name, of in delays.items()
    }


def _show(report: HandoffReport, console: Console) -> None:
    load = report.load
    table = Table(title=f"{load.model} {report.dtype}, prompts of {load.input_tokens} tokens, medians")
    for column in ("KV goes", "TTFT s", "tax", "first to second token ms", "tax, of TTFT"):
        table.add_column(column, justify="right")
    for name, of in report.delays.items():
        table.add_row(
            name,
            f"{statistics.median(of.ttft_s):.3f}",
            f"{of.ttft_tax:+.1%}",
            f"{statistics.median(of.second_token_s) * 1e3:.1f}",
            f"{of.second_token_tax:+.1%}",
        )
    console.print(table)
