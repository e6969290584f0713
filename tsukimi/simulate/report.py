"""A finished run for people and for programs."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig


def report(cluster: SimulatedCluster) -> dict[str, Any]:
    """All results of a run that are reproduced bit for bit. Times of this machine are not among them."""
    config, measures = cluster.config, cluster.measures
    end_s = cluster.ended_s
    over_cards, over_memory = cluster.hosts.moved_bytes()
    return {
        "config": _told(config),
        **measures.summary(),
        "goodput": measures.goodput(config.ttft_slo_s, config.tbt_slo_s),
        "simulated_s": end_s,
        "network_bytes": round(over_cards),
        "memory_bytes": round(over_memory),
        "nodes": {
            name: {
                "busy": worker.engine.busy_s / end_s if end_s else 0.0,
                "steps": int(worker.machine.counters["steps"]),
                "prompt_tokens_computed": int(worker.machine.counters["prompt_tokens_computed"]),
                "tokens_generated": int(worker.machine.counters["tokens_generated"]),
            }
            for name, worker in cluster.workers.items()
        },
        "caches": {name: dict(cache.machine.counters) for name, cache in cluster.caches.items()},
    }


def _told(config: SimulationConfig) -> dict[str, Any]:
    """The configuration, without a decode policy where it is the usual one: so it is in results from before there were
    others, and equal runs have equal results."""
    told: dict[str, Any] = msgspec.to_builtins(config)
    if config.decode_policy == SimulationConfig().decode_policy:
        del told["decode_policy"]
    return told


def to_json(result: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def show(result: dict[str, Any], wall_s: float, how: str, console: Console) -> None:
    """`how`: whether the scheduling code was compiled or interpreted."""
    config = result["config"]
    title = f"{config['policy']}, {config['prefill']} prefill + {config['decode']} decode"
    console.print(title, style="bold")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right" if column else "left")
    for name, key, unit in (("TTFT", "ttft_s", 1.0), ("TBT", "tbt_s", 1000.0)):
        values = [
            f"{result[key][p] * unit:.{2 if unit == 1.0 else 1}f}" for p in ("mean", "p50", "p90", "p99")
        ]
        table.add_row(f"{name} {'s' if unit == 1.0 else 'ms'}", *values)
    console.print(table)
    console.print(
        f"{result['completed']} of {result['requests']} requests completed, {result['rejected']} rejected, "
        f"{result['failed']} failed; they count in none of the times above"
    )
    console.print(f"hit rate {result['hit_rate']:.1%} of prompt tokens; {_busy(result)}")
    console.print(f"{result['simulated_s']:.0f} s simulated in {wall_s:.1f} s ({how})", highlight=False)


def _busy(result: dict[str, Any]) -> str:
    shares = []
    for role in ("prefill", "decode"):
        busy = [n["busy"] for name, n in result["nodes"].items() if name.startswith(role)]
        if busy:
            shares.append(f"{role} nodes busy {sum(busy) / len(busy):.0%}")
    return ", ".join(shares)
