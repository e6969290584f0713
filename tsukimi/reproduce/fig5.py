"""FAST'25, Fig 5: how soon answers start under four placement policies."""

from __future__ import annotations

from itertools import pairwise
from math import log, sqrt

from tsukimi.reproduce.experiment import Inputs, Picture, Result, Row
from tsukimi.reproduce.paper import FIG_5
from tsukimi.reproduce.simulated import simulated
from tsukimi.simulate.config import SimulationConfig

NODES = 16
PREFILLS = (5, 6, 7, 8, 9, 10)


def fig5(inputs: Inputs) -> Result:
    """All splits of the 16 nodes from 5 to 10 prefill nodes; the rows are of the split nearest to the paper."""
    means: dict[int, dict[str, float]] = {}
    for prefill in PREFILLS:
        means[prefill] = {
            policy: simulated(
                inputs,
                SimulationConfig(policy=policy, prefill=prefill, decode=NODES - prefill, patience=1.0),
            )["ttft_s"]["mean"]
            for policy in FIG_5
        }
    nearest = min(PREFILLS, key=lambda p: _distance(means[p]))
    ordered = [p for p in PREFILLS if _in_order(means[p])]
    return Result(
        name="fig5",
        title="mean TTFT by placement policy",
        setup=f"{inputs.trace.name}, {NODES} nodes, {nearest} of them for prefill: the nearest of "
        f"{PREFILLS[0]} to {PREFILLS[-1]}. 3 million tokens of pool a prefill node.",
        unit="s",
        rows=[Row(policy, means[nearest][policy], FIG_5[policy]) for policy in FIG_5],
        remarks=[
            f"random > load balance > cache aware > KVCache-centric with {', '.join(map(str, ordered)) or 'none'} "
            f"prefill nodes (of {', '.join(map(str, PREFILLS))}).",
            "The paper states neither the split of its nodes nor how its load balancing breaks ties. Means with "
            + "; ".join(
                f"{p} prefill nodes: " + ", ".join(f"{policy} {s:.2f}" for policy, s in means[p].items())
                for p in PREFILLS
            ),
        ],
        picture=Picture(
            "prefill nodes",
            "mean TTFT (s)",
            {policy: [(float(p), means[p][policy]) for p in PREFILLS] for policy in FIG_5},
        ),
    )


def _distance(means: dict[str, float]) -> float:
    """Root mean square of the logarithms of the ratios to the paper's means."""
    return sqrt(sum(log(means[policy] / FIG_5[policy]) ** 2 for policy in FIG_5) / len(FIG_5))


def _in_order(means: dict[str, float]) -> bool:
    values = [means[policy] for policy in FIG_5]
    return all(a > b for a, b in pairwise(values))
