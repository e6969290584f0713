"""The options of `tsukimi reproduce`. It imports its code when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tsukimi.compiled.load import use_compiled
from tsukimi.errors import ToolError
from tsukimi.options import wide_console

What = Literal["fig5", "fig9", "fig14", "table1", "table3", "all"]


def reproduce(
    what: Annotated[What, typer.Argument(help="Which experiment of the Mooncake papers.")] = "all",
    *,
    trace: Annotated[Path, typer.Option(help="The conversation trace, or another of its format.")] = Path(
        "conversation_trace.jsonl"
    ),
    pictures: Annotated[Path | None, typer.Option(help="Draw a picture of each into this folder.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    quick: Annotated[bool, typer.Option(help="Few requests: to see that it works.")] = False,
) -> None:
    """Experiments of the Mooncake papers, run again: our values, the papers', and how far they are apart."""
    for folder in [p for p in (pictures, json.parent if json else None) if p is not None]:
        if not folder.is_dir():
            raise ToolError(f"there is no folder {folder} to write to.", exit_code=2)
    use_compiled()
    import msgspec

    from tsukimi.reproduce.all import EXPERIMENTS
    from tsukimi.reproduce.experiment import Inputs, draw, show

    names = list(EXPERIMENTS) if what == "all" else [what]
    console, results = wide_console(), []
    for name in names:
        result = EXPERIMENTS[name](Inputs(trace, quick))
        results.append(result)
        show(result, console)
        if pictures is not None:
            draw(result, pictures / f"{name}.png")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
