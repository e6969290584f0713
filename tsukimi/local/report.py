"""What a person sees of a cluster that starts, runs and stops: lines, or a table that changes while it starts."""

from __future__ import annotations

import re
import time
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

STYLES = {"ready": "green", "failed": "bold red", "restarting": "yellow", "stopping": "dim", "stopped": "dim"}


NUMBER = re.compile(r"\d+")


class Report(Protocol):
    """Called from one thread. After `close` nothing changes on the screen any more."""

    def stage(self, name: str, stage: str, detail: str) -> None: ...

    def tell(self, name: str, text: str) -> None: ...

    def summary(self, lines: list[str]) -> None:
        """Called when all are ready."""
        ...

    def failure(self, name: str, why: str, log: str, log_tail: list[str]) -> None: ...

    def close(self) -> None: ...


def make_report(console: Console) -> Report:
    return TableReport(console) if console.is_terminal else LineReport(console)


class LineReport:
    """One line for everything that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._steps: dict[str, str] = {}

    def stage(self, name: str, stage: str, detail: str) -> None:
        step = f"{stage} {NUMBER.sub('', detail)}"
        if self._steps.get(name) == step:
            return  # only a percentage changed: the table shows it, and lines would hide the rest
        self._steps[name] = step
        self._line(f"{name:<12} {stage}{f' ({detail})' if detail else ''}", STYLES.get(stage, ""))

    def tell(self, name: str, text: str) -> None:
        self._line(f"{name:<12} {text}" if name else text, "yellow" if name else "")

    def summary(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)

    def failure(self, name: str, why: str, log: str, log_tail: list[str]) -> None:
        self._line(f"{name} failed: it {why}.", "bold red")
        if log_tail:
            self._console.print(Text(f"The end of {log}:"), soft_wrap=True)
            for line in log_tail:
                self._console.print(Text(f"  | {line}"), soft_wrap=True)

    def close(self) -> None:
        pass

    def _line(self, text: str, style: str) -> None:
        self._console.print(
            Text(f"[{time.monotonic() - self._began:6.1f} s] {text}", style=style), soft_wrap=True
        )


class TableReport(LineReport):
    """A table of all nodes until they are ready; lines from then on."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rows: dict[str, tuple[str, str, float]] = {}
        self._live: Live | None = Live(get_renderable=self._table, console=console, refresh_per_second=8)
        self._live.start()

    def stage(self, name: str, stage: str, detail: str) -> None:
        if self._live is None:
            if stage not in ("starting", "stopping"):
                super().stage(name, stage, detail)
            return
        self._rows[name] = (stage, detail, time.monotonic())

    def summary(self, lines: list[str]) -> None:
        self.close()
        super().summary(lines)

    def failure(self, name: str, why: str, log: str, log_tail: list[str]) -> None:
        self.close()
        super().failure(name, why, log, log_tail)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        now = time.monotonic()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("node", "stage", "for", "doing"):
            table.add_column(heading, min_width=12 if heading == "node" else 8, no_wrap=heading != "doing")
        for name, (stage, detail, since) in self._rows.items():
            style = STYLES.get(stage, "cyan")
            age = Text(f"{now - since:.1f} s", style="dim") if stage != "ready" else Text("")
            table.add_row(name, Text(stage, style=style), age, Text(detail, style="dim"))
        return table
