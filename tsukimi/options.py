"""Options that several commands share, and how commands print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

RunDirOption = Annotated[
    Path,
    typer.Option("--run-dir", envvar="TSUKIMI_RUN_DIR", help="Folder of the local cluster: logs, state."),
]
UrlOption = Annotated[
    str, typer.Option("--url", envvar="TSUKIMI_URL", help="The gateway; default: the local cluster's.")
]
NatsOption = Annotated[
    str,
    typer.Option(
        "--nats-url", envvar="TSUKIMI_NATS_URL", help="The control bus; default: the local cluster's."
    ),
]
ModelOption = Annotated[str, typer.Option(help="Which model to ask; default: the first one served.")]
DEFAULT_RUN_DIR = Path(".run")


def wide_console() -> Console:
    """The terminal as it is. For a pipe or file: wide, so that lines are not broken."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)
