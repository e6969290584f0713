"""FAST'25, Fig 14: what a prefill takes, cold and with 95 % of the prompt cached."""

from __future__ import annotations

from shared.core.costs.model import prefill_s
from shared.core.costs.presets import LLAMA2_70B_8XA800
from tsukimi.reproduce.experiment import Inputs, Picture, Result, Row
from tsukimi.reproduce.paper import FIG_14


def fig14(inputs: Inputs) -> Result:
    """Needs no trace."""
    rows, lines = [], {}
    for place, (share, name) in enumerate(((0.0, "0 % cached"), (0.95, "95 % cached"))):
        ours = {}
        for k, values in FIG_14.items():
            tokens = k * 1024
            ours[k] = prefill_s(LLAMA2_70B_8XA800, tokens, int(share * tokens))
            rows.append(Row(f"{k}k tokens, {name}", ours[k], values[place]))
        lines[f"ours, {name}"] = [(float(k), s) for k, s in ours.items()]
        lines[f"paper, {name}"] = [(float(k), v[place]) for k, v in FIG_14.items()]
    return Result(
        name="fig14",
        title="prefill time by length, cold and cached",
        setup="The time model llama2-70b-8xa800, with which all simulations here run.",
        unit="s",
        rows=rows,
        picture=Picture("prompt (thousands of tokens)", "prefill (s)", lines),
    )
