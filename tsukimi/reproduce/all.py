"""The experiments by name, in the order in which `tsukimi reproduce all` runs them."""

from __future__ import annotations

from tsukimi.reproduce.experiment import Experiment
from tsukimi.reproduce.fig5 import fig5
from tsukimi.reproduce.fig9 import fig9, table1
from tsukimi.reproduce.fig14 import fig14
from tsukimi.reproduce.table3 import table3

EXPERIMENTS: dict[str, Experiment] = {
    "fig14": fig14,
    "fig9": fig9,
    "table1": table1,
    "fig5": fig5,
    "table3": table3,
}
