"""Refusals and moves of a whole simulated cluster: no prompt is computed again and again, no answer ends in an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import parse_trace


def rows(count: int, prompt: int, output: int, gap_ms: int = 0) -> list[bytes]:
    blocks = -(-prompt // 512)
    return [
        json.dumps(
            {
                "timestamp": i * gap_ms,
                "input_length": prompt,
                "output_length": output,
                "hash_ids": [1000 * (i + 1) + j for j in range(blocks)],
            }
        ).encode()
        for i in range(count)
    ]


def run(lines: list[bytes], **config: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(SimulationConfig(**config), list(parse_trace(lines)))
    cluster.run()
    cluster.check()
    return cluster


def prefills(cluster: SimulatedCluster) -> int:
    """Prompts computed by prefill nodes."""
    nodes = [w.machine for name, w in cluster.workers.items() if name.startswith("prefill")]
    return int(sum(m.counters["accepted"] for m in nodes))


def test_who_is_refused_at_its_landing_is_not_computed_again() -> None:
    """All are admitted on arrival, when nothing decodes. One fits the objective; the others are refused as they land."""
    step_s = 0.0263 + 1.5 * 0.0032
    cluster = run(
        rows(4, 2000, 400),
        prefill=2,
        decode=1,
        tbt_slo_s=step_s / 0.9,
        admission="baseline",
        ttft_slo_s=100.0,
    )
    result = report(cluster)
    assert prefills(cluster) == 4
    assert (result["completed"], result["errors"]) == (1, {"overloaded": 3})


@pytest.mark.parametrize("admission", ["early", "predictive"])
def test_a_better_admission_refuses_before_anything_is_computed(admission: str) -> None:
    step_s = 0.0263 + 1.5 * 0.0032
    cluster = run(
        rows(4, 2000, 400, gap_ms=2000), prefill=2, decode=1, tbt_slo_s=step_s / 0.9, admission=admission
    )
    assert prefills(cluster) == 1
    assert report(cluster)["completed"] == 1


def test_an_answer_that_outgrows_every_node_ends_by_its_length() -> None:
    cluster = run(rows(1, 1000, 3000), prefill=1, decode=1, kv_tokens=2048)
    result = report(cluster)
    assert (result["completed"], result["failed"], result["rejected"]) == (1, 0, 0)
    assert 1000 < result["output_tokens"] < 2048
