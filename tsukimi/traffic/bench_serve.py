"""`tsukimi bench serve`, from its options to its report."""

from __future__ import annotations

from pathlib import Path

import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tsukimi.client import Client
from tsukimi.errors import ToolError
from tsukimi.prompts import never_seen
from tsukimi.traffic.asking import Sample
from tsukimi.traffic.drive import drive, fitting_words
from tsukimi.traffic.report import show, summarise, to_json
from tsukimi.traffic.settings import Load


def bench_serve(url: str, api_key: str, load: Load, json: Path | None, console: Console) -> None:
    """Raises ToolError if the server can't be reached, refuses the warm-up, or gives no whole answer at all. The samples
    of a failed run are in the file too."""
    if json is not None and not json.parent.is_dir():
        raise ToolError(f"there is no folder {json.parent} to write {json.name} to.")
    url = url.rstrip("/").removesuffix("/v1")
    client = Client(url, api_key)
    try:
        load = replace(load, model=load.model or client.first_model())
        words = fitting_words(client, load, never_seen())
    finally:
        client.close()
    samples = _driven(url, api_key, load, words, console)
    report = summarise(url, load, samples)
    if json is not None:
        json.write_bytes(to_json(report))
    if not report.completed:
        kinds = ", ".join(f"{n} x {reason}" for reason, n in report.failures.items())
        raise ToolError(f"no request succeeded: {kinds}. The first: {samples[0].error}")
    show(report, console)


def _driven(url: str, api_key: str, load: Load, words: int, console: Console) -> list[Sample]:
    bar = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    failed = 0
    with Progress(*bar, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task("requests", total=load.requests, failed="")

        def told(sample: Sample) -> None:
            nonlocal failed
            failed += bool(sample.reason)
            progress.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        return uvloop.run(drive(url, api_key, load, words, told))
