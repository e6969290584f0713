"""What every experiment gives: its set-up, its values beside the paper's, and a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tsukimi.errors import ToolError


class Row(Struct, frozen=True):
    """One value."""

    what: str
    ours: float
    paper: float | None = None
    """None: the paper does not say."""

    @property
    def off(self) -> float | None:
        """Ours against the paper's, as a part of it."""
        return self.ours / self.paper - 1.0 if self.paper else None


class Picture(Struct, frozen=True):
    """Lines over one axis; the papers' are drawn dashed."""

    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    log_x: bool = False


class Result(Struct, frozen=True):
    name: str
    title: str
    setup: str
    unit: str
    rows: list[Row]
    remarks: list[str] = []
    """What keeps a value from the paper's, and how much it depends on what is not stated."""
    picture: Picture | None = None


class Inputs(Struct, frozen=True):
    trace: Path
    """The conversation trace, or another of the same format."""
    quick: bool = False
    """Fewer requests: for tests of the command, not for results."""


Experiment = Callable[[Inputs], Result]


def show(result: Result, console: Console) -> None:
    console.print(f"{result.name}: {result.title}", style="bold", highlight=False)
    console.print(result.setup, highlight=False)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("", f"ours ({result.unit})", "paper", "off by"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in result.rows:
        paper = "" if row.paper is None else f"{row.paper:g}"
        off = "" if row.off is None else f"{row.off:+.1%}"
        table.add_row(row.what, f"{row.ours:.4g}", paper, off)
    console.print(table)
    for remark in result.remarks:
        console.print(f"- {remark}", highlight=False, soft_wrap=True)
    console.print()


def draw(result: Result, path: Path) -> None:
    """Raises ToolError where matplotlib is not installed. No-op for an experiment without a picture."""
    if result.picture is None:
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as e:
        raise ToolError("pictures need matplotlib: pip install 'tsukimi[plots]'") from e
    plot: Any = pyplot
    figure, axes = plot.subplots(figsize=(7, 4.5))
    for name, points in result.picture.lines.items():
        style = "--" if name.startswith("paper") else "-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, marker="o", label=name)
    if result.picture.log_x:
        axes.set_xscale("log")
    axes.set_xlabel(result.picture.x)
    axes.set_ylabel(result.picture.y)
    axes.set_title(f"{result.name}: {result.title}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plot.close(figure)
