"""One run of the simulator, watched by a person: a progress bar, a report."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.core.costs.presets import PRESETS
from shared.protocol.errors import Invalid
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report, show, to_json
from tsukimi.simulate.shaping import with_most_output, with_poisson_arrivals
from tsukimi.simulate.trace import TraceFormat, TraceRequest, doubts, read_trace


class TraceAsked(Struct, frozen=True, kw_only=True):
    """Which requests to replay, and how."""

    path: Path
    speed: float = 1.0
    requests: int = 0
    """Only the first so many; 0: all."""
    form: TraceFormat = TraceFormat()
    poisson_per_s: float = 0.0
    """Arrivals drawn anew at this rate; 0: as recorded."""
    most_output_tokens: int = 0
    """0: as recorded."""

    def read(self, seed: int, console: Console) -> list[TraceRequest]:
        """Raises Invalid. Tells of what looks like a misunderstanding."""
        requests = read_trace(self.path, speed=self.speed, requests=self.requests, form=self.form)
        if doubt := doubts(requests, self.speed, self.form):
            console.print(f"{self.path.name}: {doubt}", style="yellow", highlight=False)
        if self.poisson_per_s:
            requests = with_poisson_arrivals(requests, self.poisson_per_s, seed)
        if self.most_output_tokens:
            requests = with_most_output(requests, self.most_output_tokens)
        return requests

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        told["path"] = self.path.name
        told["sha256"] = sha256(self.path.read_bytes()).hexdigest()
        return told


UPDATES = 200
"""How often the progress bar is updated."""


def run(config: SimulationConfig, asked: TraceAsked, json: Path | None, *, compiled: bool) -> None:
    """Run, show the results, and write everything to `json`. `compiled`: whether the code is compiled. Raises Invalid
    before anything runs."""
    if config.cost not in PRESETS:
        raise Invalid(
            f"no time model is called {config.cost!r}; there are {', '.join(PRESETS)}", param="cost"
        )
    if json is not None and not json.parent.is_dir():
        raise Invalid(f"there is no folder {json.parent} to write {json.name} to", param="json")
    began = time.perf_counter()
    errors = Console(stderr=True)
    with _rare_collections():
        requests = asked.read(config.seed, errors)
        cluster = SimulatedCluster(config, requests)
        _run(cluster, errors)
        result = {"trace": asked.told(), **report(cluster)}
    how = "compiled" if compiled else "interpreted; `make compiled` makes that sooner"
    show(result, time.perf_counter() - began, how, Console())
    if json is not None:
        json.write_bytes(to_json(result))


def _run(cluster: SimulatedCluster, console: Console) -> None:
    total = len(cluster.requests)
    every = max(1, total // UPDATES)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(cluster.config.policy, total=total)
        progress.refresh()

        def progressed(done: int) -> None:
            if done % every == 0:
                progress.update(task, completed=done, refresh=True)

        cluster.run(progressed)
        progress.update(task, completed=total)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A run makes hardly any cyclic garbage. Collecting it at the usual rate would take a tenth of the time."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
