"""The console command `tsukimi`.

Each command imports its modules when it runs, so that no command waits for the others' imports.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from shared.io.config import CONFIG_EXIT_CODE, ConfigError
from shared.io.models import DEFAULT_MODEL
from shared.protocol.errors import TsukimiError
from tsukimi.bench_command import bench
from tsukimi.errors import ToolError
from tsukimi.options import DEFAULT_RUN_DIR, ModelOption, NatsOption, RunDirOption, UrlOption, wide_console
from tsukimi.reproduce.command import reproduce
from tsukimi.simulate.command import simulate

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Tsukimi: disaggregated LLM serving with one KVCache pool. Start with `tsukimi up`.",
)  # fmt: skip
app.add_typer(bench, name="bench")


@app.command()
def up(
    *,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill nodes; 0: decode nodes prefill.")] = 1,
    prefill_stages: Annotated[
        int, typer.Option(min=1, help="Processes of each prefill node, every one with a slice of the layers.")
    ] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 1,
    cache: Annotated[int, typer.Option(min=0, help="Cache nodes.")] = 1,
    model: Annotated[
        str, typer.Option(help="Alias, Hugging Face folder or hub id; or `toy`.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port, on 127.0.0.1.")] = 8000,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of each compute node or stage; 0: cores shared out.")
    ] = 0,
    kv_memory: Annotated[str, typer.Option(help="KVCache memory of each prefill and decode node.")] = "1G",
    pool_memory: Annotated[str, typer.Option(help="KVCache memory of each cache node.")] = "1G",
    policy: Annotated[str, typer.Option(help="The conductor's policy: a name, or module:Class.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Another field of a role: ROLE.FIELD=VALUE.")
    ] = None,
    use: Annotated[
        list[str] | None, typer.Option("--use", help="Another service for a role: ROLE=MODULE.")
    ] = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is ready and leave it running.")
    ] = False,
) -> None:
    """Start a cluster on this machine and keep it running until Ctrl-C or `tsukimi down`."""
    from rich.console import Console

    from tsukimi.local import plan
    from tsukimi.local import up as local
    from tsukimi.local.rundir import RunDir

    _log_nothing()
    options = plan.ClusterOptions(
        prefill=prefill, prefill_stages=prefill_stages, decode=decode, cache=cache, model=model, dtype=dtype, port=port,
        threads=threads,
        kv_bytes=plan.parse_bytes(kv_memory), pool_bytes=plan.parse_bytes(pool_memory), policy=policy,
        settings=tuple(plan.parse_setting(s) for s in set_ or ()), modules=dict(plan.parse_module(u) for u in use or ()),
    )  # fmt: skip
    if detach:
        arguments = [word for word in sys.argv[sys.argv.index("up") + 1 :] if word != "--detach"]
        raise typer.Exit(local.up_detached(arguments, RunDir(run_dir), Console()))
    raise typer.Exit(local.up(options, RunDir(run_dir), Console()))


@app.command()
def down(
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    kill: Annotated[
        bool, typer.Option("--kill", help="At once, without letting running answers end.")
    ] = False,
) -> None:
    """Stop the local cluster."""
    from tsukimi.local.rundir import RunDir
    from tsukimi.local.stop import down as stop

    typer.echo(stop(RunDir(run_dir), kill=kill))


@app.command()
def status(
    nats_url: NatsOption = "",
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
    json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Show every node: stage, load, KV blocks, hit rate."""
    import asyncio

    from tsukimi import cluster_url
    from tsukimi import status as st

    _log_nothing()
    found = asyncio.run(st.ask(cluster_url.nats_url(nats_url, run_dir)))
    if json:
        typer.echo(st.to_json(found))
    else:
        st.show(found, wide_console())


@app.command()
def chat(
    url: UrlOption = "",
    model: ModelOption = "",
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="Default: what the model's makers advise.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Talk to the model."""
    from rich.console import Console

    from tsukimi import chat as ch
    from tsukimi import cluster_url
    from tsukimi.client import Client

    client = Client(cluster_url.http_url(url, run_dir))
    options: dict[str, float] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    try:
        ch.repl(ch.Chat(client, model or client.first_model(), system, options), Console())
    finally:
        client.close()


@app.command()
def logs(
    node: Annotated[str, typer.Argument(help="Whose log; default: everybody's.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1)] = 20,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Print the end of the local cluster's logs."""
    from tsukimi.local.rundir import RunDir, display_path, tail

    logs = sorted(RunDir(run_dir).logs.glob("*.log"))
    if not logs:
        raise ToolError(f"there are no logs in {display_path(run_dir)}.")
    chosen = [log for log in logs if node in ("", log.stem)]
    if not chosen:
        raise ToolError(f"no node {node!r} has a log here; there are {', '.join(log.stem for log in logs)}.")
    for log in chosen:
        if not node:
            typer.echo(f"== {display_path(log)}")
        for line in tail(log, lines):
            typer.echo(line)


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="Alias, folder or hub id.")] = DEFAULT_MODEL) -> None:
    """Download and convert a model, so that `up` starts at once."""
    raise typer.Exit(
        subprocess.run([sys.executable, "-m", "shared.engine.weights.fetch", model], check=False).returncode
    )


app.command("simulate")(simulate)
app.command("reproduce")(reproduce)


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="A file written by a service's --record.")],
) -> None:
    """Replay a recorded node's events through its machine and compare the commands."""
    from tsukimi import replay as re

    result = re.replay(recording)
    typer.echo(re.summary(result))
    if result.difference is not None:
        raise ToolError(re.explain(result.difference))
    typer.echo("identical")


def _log_nothing() -> None:
    """Silence the logs of modules that are shared with services. The tool prints its own messages."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _exit_code(error: ToolError | TsukimiError) -> int:
    if isinstance(error, ToolError):
        return error.exit_code
    return CONFIG_EXIT_CODE if isinstance(error, ConfigError) else 1


def main() -> None:
    """Run the command. An expected error becomes one sentence on stderr."""
    try:
        app()
    except (ToolError, TsukimiError) as e:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text(f"tsukimi: {e}"), soft_wrap=True)
        sys.exit(_exit_code(e))
    finally:
        gc.freeze()  # the process ends: no garbage need be collected
