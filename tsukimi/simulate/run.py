"""One run of the simulator, watched by a person: a progress bar, a report."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shared.core.costs.presets import PRESETS
from shared.protocol.errors import Invalid
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report, show, to_json
from tsukimi.simulate.trace import read_trace

UPDATES = 200
"""How often the progress bar is updated."""


def run(
    config: SimulationConfig, trace: Path, speed: float, requests: int, json: Path | None, *, compiled: bool
) -> None:
    """Run, show the results, and write everything to `json`. `compiled`: whether the code is compiled. Raises Invalid."""
    if config.cost not in PRESETS:
        raise Invalid(
            f"no time model is called {config.cost!r}; there are {', '.join(PRESETS)}", param="cost"
        )
    began = time.perf_counter()
    with _rare_collections():
        cluster = SimulatedCluster(config, read_trace(trace, speed=speed, requests=requests))
        _run(cluster, Console(stderr=True))
        result = report(cluster)
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
