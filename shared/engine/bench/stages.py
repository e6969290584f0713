"""Compares a prefill group of stages with one process that has the threads of one stage: same prompts, alternating."""

from __future__ import annotations

import os
import statistics

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.engine.bench.worker import Worker


class StagesCase(Struct, frozen=True):
    tokens: int
    group_s: tuple[float, ...]
    single_s: tuple[float, ...]
    same_token: bool
    """Whether both sampled the same first token in every round."""

    @property
    def ratio(self) -> float:
        """How many times faster the group is, by medians."""
        return statistics.median(self.single_s) / statistics.median(self.group_s)


class StagesReport(Struct, frozen=True):
    model: str
    about: str
    stages: int
    piece_tokens: int
    threads: int
    """Of each stage, and of the single process."""
    load_before: float
    """The machine's one-minute load average before anything was started."""
    cases: tuple[StagesCase, ...]
    ratios: dict[str, float]


def measure(
    model: str, dtype: str, threads: int, stages: int, piece_tokens: int, lengths: list[int], rounds: int
) -> StagesReport:
    load = os.getloadavg()[0]
    common = {
        "model": model,
        "dtype": dtype,
        "threads": threads,
        "backend": "cpu",
        "kv_tokens": max(lengths) + 64,
    }
    single = Worker("Tsukimi", **common)
    group = Worker("Tsukimi", **common, stages=stages, piece_tokens=piece_tokens)
    cases = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(lengths) * rounds * 2)
        for tokens in lengths:
            seconds: dict[Worker, list[float]] = {single: [], group: []}
            said: dict[Worker, list[int]] = {single: [], group: []}
            for _ in range(rounds):
                for worker in (group, single):
                    seconds[worker].append(worker.ask("prefill", tokens))
                    said[worker].append(worker.ask("said"))
                    progress.advance(task)
            same = said[single] == said[group]
            cases.append(StagesCase(tokens, tuple(seconds[group]), tuple(seconds[single]), same))
    about = group.ask("about")
    group.close()
    single.close()
    ratios = {f"cpp {case.tokens}": round(case.ratio, 3) for case in cases}
    return StagesReport(model, about, stages, piece_tokens, threads, load, tuple(cases), ratios)


def show(report: StagesReport, console: Console) -> None:
    table = Table(title=f"{report.model}, {report.about}, load before {report.load_before:.2f}")
    group = f"{report.stages} stages x {report.threads} threads, pieces of {report.piece_tokens}"
    for column in ("prompt", group, f"1 x {report.threads} threads", "times as fast", "same token"):
        table.add_column(column, justify="right")
    for case in report.cases:
        shown = [f"{statistics.median(s):.2f} s" for s in (case.group_s, case.single_s)]
        table.add_row(str(case.tokens), *shown, f"{case.ratio:.2f}", "yes" if case.same_token else "no")
    console.print(table)
