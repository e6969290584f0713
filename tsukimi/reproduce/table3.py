"""arXiv, Table 3: refusals under overload, by admission mode."""

from __future__ import annotations

from typing import Any

from tsukimi.reproduce.experiment import Inputs, Result, Row
from tsukimi.reproduce.paper import TABLE_3, TBT_SLO_S, TTFT_SLO_S
from tsukimi.reproduce.simulated import simulated
from tsukimi.simulate.config import SimulationConfig

SPEED = 2.0


def table3(inputs: Inputs) -> Result:
    runs: dict[str, dict[str, Any]] = {}
    for mode in ("none", "baseline", "early", "predictive"):
        config = SimulationConfig(ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S, admission=mode)
        runs[mode] = simulated(inputs, config, SPEED)
    return Result(
        name="table3",
        title="refusals at twice the recorded load, by admission",
        setup=f"{inputs.trace.name} at {SPEED:g} times its speed, 8 prefill and 8 decode nodes, TTFT {TTFT_SLO_S:g} s, "
        f"TBT {TBT_SLO_S:g} s.",
        unit="requests refused",
        rows=[Row(mode, float(run["rejected"]), TABLE_3.get(mode)) for mode, run in runs.items()],
        remarks=[
            *(
                f"{mode}: {run['completed']} completed, {run['goodput']:.1%} within both objectives, "
                f"{run['wasted_prefills']} refused after their prefill, {run['wasted_prefill_s']:.0f} s of it wasted."
                for mode, run in runs.items()
            ),
            "The paper replays 23,000 requests of another trace; its order of the three is what can be compared.",
        ],
    )
