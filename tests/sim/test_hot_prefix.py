"""A prefix that everybody shares must not send everybody to one node."""

from __future__ import annotations

import json

import pytest

from tests.sim.test_simulate import simulated
from tsukimi.simulate.report import report

PREFILLS = 4
HEAD = (1, 2, 3, 4)
"""Four blocks of 512 tokens: 2k."""


def rows(count: int, every_ms: float) -> list[bytes]:
    """Prompts of the head and a question of its own each."""
    return [
        json.dumps(
            {
                "timestamp": int(i * every_ms),
                "input_length": 512 * len(HEAD) + 700,
                "output_length": 20,
                "hash_ids": [*HEAD, 10 + 2 * i, 11 + 2 * i],
            }
        ).encode()
        for i in range(count)
    ]


@pytest.mark.parametrize("policy", ["kvcache_centric", "joint"])
@pytest.mark.parametrize("keep_blocks", [False, True])
def test_a_head_that_a_thousand_prompts_share_is_copied_and_the_load_is_even(
    policy: str, keep_blocks: bool
) -> None:
    cluster = simulated(rows(1000, 60.0), policy=policy, prefill=PREFILLS, decode=4, keep_blocks=keep_blocks)
    result = report(cluster)
    assert result["completed"] == 1000
    busy = [node["prompt_tokens_computed"] for name, node in result["nodes"].items() if "prefill" in name]
    assert len(busy) == PREFILLS
    assert max(busy) / (sum(busy) / PREFILLS) < 1.3
    held = cluster.conductor.index.match(cluster.requests[0].block_keys[: len(HEAD)])
    assert [held.run(cache) for cache in sorted(cluster.caches)] == [len(HEAD)] * PREFILLS, "it is everywhere"
    assert result["cached_tokens"] > 0.98 * 1000 * 512 * len(HEAD), "and nobody computes it again"
