"""The options of `tsukimi bench`. Each benchmark imports its code when it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from shared.io.models import DEFAULT_MODEL
from tsukimi.errors import ToolError
from tsukimi.options import DEFAULT_RUN_DIR, ModelOption, NatsOption, RunDirOption, UrlOption, wide_console

bench = typer.Typer(no_args_is_help=True, help="Measure a running cluster.")


@bench.command("prefix")
def bench_prefix(
    url: UrlOption = "",
    model: ModelOption = "",
    tokens: Annotated[int, typer.Option(min=16, help="Length of the shared prefix.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Each one a cold and a warm request.")] = 5,
    json: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Time to first token with a long shared prefix: cold, and found in the pool."""
    from rich.console import Console

    from tsukimi import cluster_url
    from tsukimi.client import Client
    from tsukimi.traffic import bench_prefix as be

    client = Client(cluster_url.http_url(url, run_dir))
    console = Console()
    try:
        report = be.run(client, model or client.first_model(), tokens, rounds, console)
    finally:
        client.close()
    be.show(report, console)
    if json is not None:
        json.write_bytes(be.to_json(report))


@bench.command("serve")
def bench_serve(
    *,
    url: Annotated[
        str,
        typer.Option(
            "--url", envvar="TSUKIMI_URL", help="Any OpenAI-compatible server; default: the local cluster's."
        ),
    ] = "",
    model: ModelOption = "",
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="TSUKIMI_API_KEY", help="Sent as a bearer token.")
    ] = "",
    requests: Annotated[int, typer.Option(min=1)] = 64,
    input_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, about.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, at most.")] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: so many clients, one request each at a time; default 4."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Open loop: requests a second, as a Poisson process.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrival times; prompts are always new.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which count nowhere.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Ask /v1/chat/completions.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for all output tokens; not every server knows how.")
    ] = False,
    ttft_slo_s: Annotated[float, typer.Option(min=0.0, help="For the goodput; 0: none.")] = 0.0,
    tbt_slo_s: Annotated[
        float, typer.Option(min=0.0, help="On the mean of an answer's longest tenth of gaps; 0: none.")
    ] = 0.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Put load on any OpenAI-compatible server: times to first token and between tokens, throughput, failures."""
    from tsukimi import cluster_url
    from tsukimi.traffic import bench_serve as load_bench
    from tsukimi.traffic.settings import Load

    if concurrency is not None and rate is not None:
        raise ToolError(
            "--concurrency is for a closed loop and --rate for an open one: give one.", exit_code=2
        )
    load = Load(
        model=model, requests=requests, input_tokens=input_tokens, output_tokens=output_tokens,
        concurrency=concurrency or 4, rate=rate or 0.0, seed=seed, warmup=warmup, chat=chat, ignore_eos=ignore_eos,
        ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s,
    )  # fmt: skip
    load_bench.bench_serve(cluster_url.http_url(url, run_dir), api_key, load, json, wide_console())


@bench.command(
    "engine",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def bench_engine(context: typer.Context) -> None:
    """The engine alone, beside transformers in the same run. Needs no cluster. --help shows its options."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "shared.engine.bench", *context.args]))


@bench.command("stack")
def bench_stack(
    model: Annotated[str, typer.Option(help="Alias, Hugging Face folder or hub id.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a round.")] = 48,
    input_tokens: Annotated[int, typer.Option(min=1)] = 256,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each, in turns.")] = 3,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Clusters of two threads in all, beside transformers' static generate with two. Starts its own clusters."""
    from rich.console import Console

    from tsukimi.traffic import bench_stack as stack
    from tsukimi.traffic.settings import Load

    load = Load(
        model=model, requests=requests, input_tokens=input_tokens, output_tokens=output_tokens,
        concurrency=concurrency, ignore_eos=True,
    )  # fmt: skip
    stack.bench_stack(load, dtype, rounds, json, Console())


@bench.command("handoff")
def bench_handoff(
    model: Annotated[str, typer.Option(help="Alias, Hugging Face folder or hub id.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    tokens: Annotated[int, typer.Option(min=16, help="Length of the prompts.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts for each way, in turns.")] = 5,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """What sending the KVCache to another process costs: by layer, at the end, or not at all. Starts its own clusters."""
    from rich.console import Console

    from tsukimi.traffic import bench_handoff as handoff
    from tsukimi.traffic.settings import Load

    load = Load(model=model, requests=1, input_tokens=tokens, output_tokens=8, ignore_eos=True)
    handoff.bench_handoff(load, dtype, rounds, json, Console())


@bench.command("trace")
def bench_trace(
    trace: Annotated[Path, typer.Argument(help="Requests, in the format of the Mooncake traces.")],
    *,
    url: UrlOption = "",
    nats_url: NatsOption = "",
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="TSUKIMI_API_KEY", help="Sent as a bearer token.")
    ] = "",
    scale: Annotated[float, typer.Option(min=1e-6, help="Of prompts' and answers' lengths.")] = 1 / 32,
    requests: Annotated[int, typer.Option(min=1, help="Rows of the trace.")] = 200,
    load: Annotated[
        float, typer.Option(min=0.01, help="Share of the cluster's capacity, which is measured first.")
    ] = 0.5,
    speed: Annotated[float, typer.Option(min=0.0, help="Instead: so many times as fast as recorded.")] = 0.0,
    max_output: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1 << 20,
    ttft_slo_s: Annotated[float, typer.Option(min=0.0, help="For the goodput; 0: none.")] = 0.0,
    tbt_slo_s: Annotated[
        float, typer.Option(min=0.0, help="On the mean of an answer's longest tenth of gaps; 0: none.")
    ] = 0.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file.")] = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """A recorded trace on a live cluster, beside the simulator fed with the same rows."""
    from tsukimi.traffic import bench_trace as on_trace

    given = on_trace.TraceLoad(
        trace=trace, scale=scale, requests=requests, load=load, speed=speed, most_output_tokens=max_output,
        ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s,
    )  # fmt: skip
    http, nats = on_trace.urls(url, nats_url, run_dir)
    on_trace.bench_trace(given, http, nats, api_key, json, wide_console())
