"""`tsukimi bench prefix`: the time saved by a prefix in the KVCache pool, cold against warm in one run."""

from __future__ import annotations

import random
import statistics
import time

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tsukimi.client import Client, Outcome
from tsukimi.errors import ToolError
from tsukimi.prompts import never_seen, text, words_for

SETTLE_S = 0.5
"""Pause between cold and warm, in seconds, for the pool's block events to reach the conductor."""
COLD_ENDING = "The first of these words"
WARM_ENDINGS = ("The last of these words", "The best of these words", "All of these words")


class Sample(Struct, frozen=True):
    round: int
    kind: str
    """cold or warm."""
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


class PrefixReport(Struct, frozen=True):
    model: str
    prefix_tokens: int
    rounds: int
    cold_ttft_s: float
    warm_ttft_s: float
    ratio: float
    """Medians, warm over cold."""
    failures: int
    samples: tuple[Sample, ...]


def run(client: Client, model: str, prefix_tokens: int, rounds: int, console: Console) -> PrefixReport:
    """Each round asks with a new prefix (cold), then with the same and another ending (warm). Raises ToolError."""
    rng = never_seen()
    words = _calibrate(client, model, prefix_tokens, rng)
    samples: list[Sample] = []
    failures = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("cold and warm", total=2 * rounds)
        for i in range(rounds):
            prefix = text(rng, words)
            for kind, ending in (("cold", COLD_ENDING), ("warm", WARM_ENDINGS[i % 3])):
                try:
                    samples.append(_ask(client, model, prefix, ending, i, kind))
                except ToolError as e:
                    failures += 1
                    progress.console.print(f"round {i}, {kind}: {e.message}")
                progress.advance(task)
                time.sleep(SETTLE_S)
    return summarise(model, prefix_tokens, rounds, failures, samples)


def summarise(
    model: str, prefix_tokens: int, rounds: int, failures: int, samples: list[Sample]
) -> PrefixReport:
    """Medians over the requests that succeeded. Failures are counted separately. Raises ToolError if a side has none."""
    times = {kind: [s.ttft_s for s in samples if s.kind == kind] for kind in ("cold", "warm")}
    if not all(times.values()):
        raise ToolError("no round gave both a cold and a warm answer.")
    cold, warm = statistics.median(times["cold"]), statistics.median(times["warm"])
    return PrefixReport(model, prefix_tokens, rounds, cold, warm, warm / cold, failures, tuple(samples))


def _calibrate(client: Client, model: str, prefix_tokens: int, rng: random.Random) -> int:
    """How many words make this many tokens. Sends two small requests, which also warm the engine up."""
    return words_for(
        prefix_tokens,
        lambda prefix: _ask(client, model, prefix, COLD_ENDING, -1, "calibration").prompt_tokens,
        rng,
    )


def _ask(client: Client, model: str, prefix: str, ending: str, round_: int, kind: str) -> Sample:
    outcome = Outcome()
    body = {
        "model": model, "prompt": f"{prefix}.\n\n{ending}",
        "temperature": 0, "max_tokens": 4, "ignore_eos": True,
    }  # fmt: skip
    for _ in client.stream("/v1/completions", body, outcome):
        pass
    if outcome.ttft_s is None:
        raise ToolError("an answer without text")
    return Sample(round_, kind, outcome.ttft_s, outcome.prompt_tokens, outcome.cached_tokens)


def show(report: PrefixReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("round", "cold TTFT", "warm TTFT", "prompt tokens", "from the cache"):
        table.add_column(heading, justify="right")
    for i in range(report.rounds):
        pair = {s.kind: s for s in report.samples if s.round == i}
        cold, warm = pair.get("cold"), pair.get("warm")
        table.add_row(
            str(i + 1), f"{cold.ttft_s:.3f} s" if cold else "failed", f"{warm.ttft_s:.3f} s" if warm else "failed",
            str(warm.prompt_tokens) if warm else "", str(warm.cached_tokens) if warm else "",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"\nmedian TTFT: cold {report.cold_ttft_s:.3f} s, warm {report.warm_ttft_s:.3f} s; ratio {report.ratio:.3f}"
        + (f"; {report.failures} failed" if report.failures else ""),
        highlight=False,
    )


def to_json(report: PrefixReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report))
