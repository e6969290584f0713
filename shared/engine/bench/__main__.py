"""`python -m shared.engine.bench`, which `tsukimi bench engine` runs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
import typer
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.engine.bench import stages as staged
from shared.engine.bench.worker import Worker
from shared.engine.hardware import cpu_computes_bfloat16
from shared.engine.native.kernels import kernels
from shared.io.models import DEFAULT_MODEL
from shared.protocol.errors import Invalid

DECODE_STEPS = 12


class Case(Struct, frozen=True):
    kind: str
    """prefill or decode."""
    size: int
    """Tokens of the prompt, or sequences in the batch."""
    ours_s: tuple[float, ...]
    theirs_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times faster this engine is, by medians."""
        return statistics.median(self.theirs_s) / statistics.median(self.ours_s)


class EngineReport(Struct, frozen=True):
    model: str
    threads: int
    kernels: str
    ours: str
    theirs: str
    context_tokens: int
    cases: tuple[Case, ...]
    ratios: dict[str, float]
    ours_peak_bytes: int
    theirs_peak_bytes: int


def main(
    *,
    model: Annotated[str, typer.Option(help="Alias, Hugging Face folder or hub id.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    peer_dtype: Annotated[str, typer.Option(help="transformers' format; default: the same.")] = "",
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of each; 0: all, divided among stages.")
    ] = 0,
    backend: Annotated[str, typer.Option(help="The engine's backend.")] = "auto",
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048,6000",
    batches: Annotated[str, typer.Option(help="Sequences in a decode step.")] = "1,4,16,32",
    context: Annotated[int, typer.Option(min=1, help="Tokens before each decode step.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each case, alternating.")] = 3,
    stages: Annotated[
        int, typer.Option(min=1, help="If > 1: compare a group of stages with one process instead.")
    ] = 1,
    piece_tokens: Annotated[int, typer.Option(min=1, help="Tokens passed between stages at a time.")] = 256,
    json: Annotated[Path | None, typer.Option(help="Write all samples to this file.")] = None,
) -> None:
    """Compare prefill speed, decode speed and peak memory with transformers (sdpa) in one run. Speeds are medians."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(open(os.devnull, "w")))  # noqa: SIM115
    if dtype == "auto":
        dtype = "bfloat16" if cpu_computes_bfloat16() else "float32"
    threads = threads or max(1, (os.cpu_count() or 1) // stages)
    if stages > 1:
        lengths = _numbers(prompts, "prompts")
        group = staged.measure(model, dtype, threads, stages, piece_tokens, lengths, rounds)
        staged.show(group, Console(width=100))
        _write(group, json)
        return
    lengths, sizes = _numbers(prompts, "prompts"), _numbers(batches, "batches")
    room = max([*lengths, *(n * (context + DECODE_STEPS + 32) for n in sizes)]) + 64
    built = kernels()
    ours = Worker("Tsukimi", model=model, dtype=dtype, threads=threads, backend=backend, kv_tokens=room)
    theirs = Worker("Transformers", model=model, dtype=peer_dtype or dtype, threads=threads)
    cases = tuple(_measured(ours, theirs, lengths, sizes, context, rounds))
    report = EngineReport(
        model,
        threads,
        built.build if built else "none",
        ours.ask("about"),
        theirs.ask("about"),
        context,
        cases,
        {f"{case.kind} {case.size}": round(case.ratio, 3) for case in cases},
        ours.ask("peak_bytes"),
        theirs.ask("peak_bytes"),
    )
    ours.close()
    theirs.close()
    _show(report, Console(width=100))
    _write(report, json)


def _write(report: Struct, file: Path | None) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def _measured(
    ours: Worker, theirs: Worker, lengths: list[int], sizes: list[int], context: int, rounds: int
) -> Iterator[Case]:
    asked = [("prefill", n, (n,)) for n in lengths]
    asked += [("decode", n, (n, context, DECODE_STEPS)) for n in sizes]  # type: ignore[misc]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(asked) * rounds * 2)
        for kind, size, arguments in asked:
            samples: dict[Worker, list[float]] = {ours: [], theirs: []}
            for _ in range(rounds):
                for worker in (ours, theirs):
                    progress.update(task, description=f"{kind} {size}")
                    samples[worker].append(worker.ask(kind, *arguments))
                    progress.advance(task)
            yield Case(kind, size, tuple(samples[ours]), tuple(samples[theirs]))


def _show(report: EngineReport, console: Console) -> None:
    table = Table(title=f"{report.model}, {report.threads} threads, kernels {report.kernels}")
    for column in ("", f"tsukimi ({report.ours})", f"transformers ({report.theirs})", "times as fast"):
        table.add_column(column, justify="right")
    for case in report.cases:
        seconds = (statistics.median(case.ours_s), statistics.median(case.theirs_s))
        if case.kind == "prefill":
            name, shown = f"prefill {case.size}", [f"{case.size / s:.0f} tok/s" for s in seconds]
        else:
            name = f"decode {case.size} x {report.context_tokens}"
            shown = [f"{s * 1e3:.1f} ms/step" for s in seconds]
        table.add_row(name, *shown, f"{case.ratio:.2f}")
    peaks = (report.ours_peak_bytes, report.theirs_peak_bytes)
    table.add_row("peak memory", *(f"{peak / 2**30:.2f} GiB" for peak in peaks), "")
    console.print(table)


def _numbers(text: str, name: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise Invalid(f"--{name} takes comma-separated numbers, not {text!r}", param=name) from None
    if any(n < 1 for n in numbers):
        raise Invalid(f"--{name} takes numbers of at least 1", param=name)
    return numbers


if __name__ == "__main__":
    try:
        typer.run(main)
    except (Invalid, RuntimeError) as e:
        raise SystemExit(f"error: {e}") from None
