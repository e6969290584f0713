"""One simulated run for an experiment."""

from __future__ import annotations

from typing import Any

from tsukimi.reproduce.experiment import Inputs
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import read_trace

QUICK = 300
"""Requests of a quick run."""


def simulated(inputs: Inputs, config: SimulationConfig, speed: float = 1.0) -> dict[str, Any]:
    requests = read_trace(inputs.trace, speed=speed, requests=QUICK if inputs.quick else 0)
    cluster = SimulatedCluster(config, requests)
    cluster.run()
    return report(cluster)
