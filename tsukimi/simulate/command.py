"""The options of `tsukimi simulate`. It imports its code when it runs, so that other commands do not wait for that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shared.core.conductor.objectives import AdmissionMode
from shared.core.costs.presets import PRESETS
from tsukimi.compiled.load import use_compiled

TimeUnit = Literal["s", "ms", "us"]


def simulate(
    trace: Annotated[Path, typer.Argument(help="Requests, in the format of the Mooncake traces.")],
    policy: Annotated[
        str, typer.Option(help="The conductor's policy: a name, or module:Class.")
    ] = "kvcache_centric",
    *,
    decode_policy: Annotated[
        str, typer.Option(help="Which decode node goes on: a name, or module:Class.")
    ] = "least_tbt",
    prefill: Annotated[
        int, typer.Option(min=0, help="Prefill nodes, each with a cache node; 0: decode nodes prefill.")
    ] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 8,
    speed: Annotated[float, typer.Option(min=1e-6, help="Replay so many times as fast as recorded.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="Only the first so many; 0: all.")] = 0,
    time_unit: Annotated[TimeUnit, typer.Option(help="Of the trace's timestamps: s, ms or us.")] = "ms",
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a block of the trace, and of the cluster.")
    ] = 512,
    sort: Annotated[bool, typer.Option(help="Rows may be out of order.")] = False,
    poisson: Annotated[
        float, typer.Option(min=0.0, help="Draw arrivals anew, so many a second; 0: as recorded.")
    ] = 0.0,
    max_output: Annotated[int, typer.Option(min=0, help="Most tokens of an answer; 0: as recorded.")] = 0,
    balancing_threshold: Annotated[
        float, typer.Option(min=1.0, help="Pull a prefix if it is so many times as long as the local one.")
    ] = 1.0,
    ttft_slo: Annotated[
        float, typer.Option(min=0.0, help="Objective for the time to the first token, in s; 0: none.")
    ] = 0.0,
    tbt_slo: Annotated[
        float, typer.Option(min=0.0, help="Objective for the time between tokens, in s; 0: none.")
    ] = 0.0,
    admission: Annotated[
        AdmissionMode,
        typer.Option(help="What is refused for the objectives; none: nothing, they only measure."),
    ] = "none",
    max_wait: Annotated[
        float, typer.Option(min=0.0, help="Refuse what would wait longer for its prefill, in s; 0: nothing.")
    ] = 0.0,
    patience: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Wait for a prefix that is being computed, if the first token comes at most so late.",
        ),
    ] = 1.5,
    pool_tokens: Annotated[
        int, typer.Option(min=512, help="Memory of each cache node, in tokens.")
    ] = 3_000_000,
    kv_tokens: Annotated[
        int, typer.Option(min=512, help="Memory of each compute node, in tokens.")
    ] = 1_000_000,
    keep_blocks: Annotated[
        bool, typer.Option(help="Compute nodes keep blocks too, beside the pool.")
    ] = False,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens of one prefill step.")
    ] = 131_072,
    max_prefills: Annotated[
        int, typer.Option(min=1, help="Prompts a prefill node has in work at a time.")
    ] = 1,
    inline_tokens: Annotated[
        int, typer.Option(min=0, help="Most uncached tokens a decode node prefills itself.")
    ] = 0,
    cost: Annotated[str, typer.Option(help=f"Time model: {', '.join(PRESETS)}.")] = "llama2-70b-8xa800",
    fitted_costs: Annotated[
        bool, typer.Option(help="Nodes learn their time models from what they measure, as live ones do.")
    ] = False,
    noise: Annotated[
        float, typer.Option(min=0.0, help="Standard deviation of the logarithm of engine times.")
    ] = 0.0,
    nic_gbps: Annotated[float, typer.Option(min=0.001, help="Network card of a host, Gbit/s.")] = 696.0,
    shm_gbps: Annotated[float, typer.Option(min=0.001, help="Memory bus of a host, Gbit/s.")] = 1024.0,
    message_ms: Annotated[float, typer.Option(min=0.0, help="How long a control message takes.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For policies that draw lots, and for noise.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    interpreted: Annotated[
        bool, typer.Option(help="Run the Python source even where it was compiled.")
    ] = False,
) -> None:
    """Replay a trace through the scheduling code of the cluster, without one."""
    compiled = not interpreted and use_compiled()
    from msgspec.structs import replace

    from tsukimi.simulate.config import LLAMA_70B, SimulationConfig
    from tsukimi.simulate.run import TraceAsked, run
    from tsukimi.simulate.trace import TraceFormat

    config = SimulationConfig(
        policy=policy,
        decode_policy=decode_policy,
        prefill=prefill,
        decode=decode,
        balancing_threshold=balancing_threshold,
        seed=seed,
        ttft_slo_s=ttft_slo,
        tbt_slo_s=tbt_slo,
        admission=admission,
        max_wait_s=max_wait,
        patience=patience,
        kv_tokens=kv_tokens,
        keep_blocks=keep_blocks,
        pool_tokens=pool_tokens,
        chunk_tokens=chunk_tokens,
        max_prefills=max_prefills,
        inline_tokens=inline_tokens,
        layout=replace(LLAMA_70B, block_tokens=block_tokens),
        cost=cost,
        fitted_costs=fitted_costs,
        noise=noise,
        nic_bytes_s=nic_gbps * 1e9 / 8,
        shm_bytes_s=shm_gbps * 1e9 / 8,
        message_s=message_ms / 1000,
    )
    asked = TraceAsked(
        path=trace,
        speed=speed,
        requests=requests,
        form=TraceFormat(time_unit=time_unit, block_tokens=block_tokens, sort=sort),
        poisson_per_s=poisson,
        most_output_tokens=max_output,
    )
    run(config, asked, json, compiled=compiled)
